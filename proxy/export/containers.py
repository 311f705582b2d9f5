"""The containers that rows come in: bytes, one row after the other, in constant memory.

Holds JSON, NDJSON and MessagePack, and which container is meant. What a row holds is its format's business.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

import orjson

from proxy.export.base import Format
from proxy.export.columnar import Arrow, Parquet
from proxy.trajectory.json_bytes import to_json_bytes


class Writer(Protocol):
    """Rows of one export as bytes: the opening, each row, the closing, in this order."""

    def opening(self) -> bytes:
        """What comes before the first row."""
        ...

    def row(self, row: Any) -> bytes:
        """What can be said with this row; nothing where rows are gathered first."""
        ...

    def fills(self, row: Any) -> bool:
        """Whether a batch of rows is written with this one, which takes milliseconds."""
        ...

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """What comes after the last row, with a report of what was left out if one is wanted."""
        ...


class Container(Protocol):
    """One kind of container. `nests`: a row may be any JSON value; else it has the columns of its format."""

    content_type: str
    nests: bool

    def writer(self, form: Format) -> Writer:
        """A writer for one export of this format. Raises ValueError where a library for it is not installed."""
        ...


class Json:
    """One object: `{"format": …, "rows": […], "report": …}`."""

    content_type = "application/json"
    nests = True

    def writer(self, form: Format) -> Writer:
        """A writer of one object."""
        return _JsonWriter(form.name)


class _JsonWriter:
    def __init__(self, format_name: str) -> None:
        self._name = format_name
        self._between = b""

    def opening(self) -> bytes:
        return b'{"format":' + orjson.dumps(self._name) + b',"rows":['

    def row(self, row: Any) -> bytes:
        between, self._between = self._between, b","
        return between + to_json_bytes(row)

    def fills(self, row: Any) -> bool:
        return False

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        return b"]}" if report is None else b'],"report":' + orjson.dumps(report) + b"}"


class Ndjson:
    """One row a line; a report is a last line `{"report": …}`."""

    content_type = "application/x-ndjson"
    nests = True

    def writer(self, form: Format) -> Writer:
        """A writer of lines."""
        return self

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def row(self, row: Any) -> bytes:
        """One line."""
        return to_json_bytes(row) + b"\n"

    def fills(self, row: Any) -> bool:
        """Never: rows are not gathered."""
        return False

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """The report, if one is wanted."""
        return b"" if report is None else orjson.dumps({"report": report}) + b"\n"


class Msgpack:
    """One message a row, one after the other; a report is a last message `{"report": …}`."""

    content_type = "application/vnd.msgpack"
    nests = True

    def writer(self, form: Format) -> Writer:
        """A writer of messages. Raises ValueError where msgspec is not installed."""
        try:
            return _MsgpackWriter(import_module("msgspec.msgpack").Encoder())
        except ImportError:
            raise ValueError(
                "the container msgpack needs msgspec, which is not installed: tokentape[msgpack]"
            ) from None


class _MsgpackWriter:
    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def opening(self) -> bytes:
        return b""

    def row(self, row: Any) -> bytes:
        return bytes(self._encoder.encode(row))

    def fills(self, row: Any) -> bool:
        return False

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        return b"" if report is None else self.row({"report": report})


CONTAINERS: dict[str, Container] = {
    "json": Json(),
    "ndjson": Ndjson(),
    "msgpack": Msgpack(),
    "parquet": Parquet(),
    "arrow": Arrow(),
}


def container_for(accept: str | None, named: str | None) -> Container:
    """The container asked for by name, or else by an `Accept` header; JSON if neither says. Raises ValueError."""
    if named is not None:
        if named not in CONTAINERS:
            raise ValueError(f"the container {named!r} is not known; known are {', '.join(CONTAINERS)}")
        return CONTAINERS[named]
    kinds = [kind.partition(";")[0].strip().lower() for kind in (accept or "").split(",")]
    return next(
        (found for kind in kinds for found in CONTAINERS.values() if found.content_type == kind),
        CONTAINERS["json"],
    )
