"""The containers of rows: JSON, NDJSON, MessagePack, Parquet and Arrow, written row by row in constant memory."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec.msgpack
import orjson

from proxy.export.base import Format
from proxy.export.columnar import Arrow, Parquet
from proxy.trajectory.json_bytes import to_json_bytes


class Writer(Protocol):
    """Writes the rows of one export: the opening, each row, the closing."""

    def opening(self) -> bytes:
        """Return the bytes before the first row."""
        ...

    def row(self, row: Any) -> bytes:
        """Return the bytes that can be written with this row; none if rows are collected in batches."""
        ...

    def fills(self, row: Any) -> bool:
        """Return whether this row completes a batch, whose writing takes milliseconds."""
        ...

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """Return the bytes after the last row, with the report of skipped steps if there is one."""
        ...


class Container(Protocol):
    """One kind of container. `nests`: a row may be any JSON value; else it has the columns of its format."""

    content_type: str
    nests: bool

    def writer(self, form: Format) -> Writer:
        """Return a writer for one export of this format.

        Raises:
            ValueError: A required library is not installed.
        """
        ...


class Json:
    """One object: `{"format": …, "rows": […], "report": …}`."""

    content_type = "application/json"
    nests = True

    def writer(self, form: Format) -> Writer:
        """Return a writer of one object."""
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
    """One row per line; a report is a last line `{"report": …}`."""

    content_type = "application/x-ndjson"
    nests = True

    def writer(self, form: Format) -> Writer:
        """Return a writer of lines."""
        return self

    def opening(self) -> bytes:
        """Return nothing."""
        return b""

    def row(self, row: Any) -> bytes:
        """Return one line."""
        return to_json_bytes(row) + b"\n"

    def fills(self, row: Any) -> bool:
        """Return False: rows are not collected."""
        return False

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """Return the report, if there is one."""
        return b"" if report is None else orjson.dumps({"report": report}) + b"\n"


class Msgpack:
    """One message per row, concatenated; a report is a last message `{"report": …}`."""

    content_type = "application/vnd.msgpack"
    nests = True

    def writer(self, form: Format) -> Writer:
        """Return a writer of messages."""
        return _MsgpackWriter()


class _MsgpackWriter:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def opening(self) -> bytes:
        return b""

    def row(self, row: Any) -> bytes:
        return self._encoder.encode(row)

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
    """Return the container with this name, or else the one that an `Accept` header requests; JSON by default.

    Raises:
        ValueError: The name is unknown.
    """
    if named is not None:
        if named not in CONTAINERS:
            raise ValueError(f"Unknown container {named!r}; use one of {', '.join(CONTAINERS)}.")
        return CONTAINERS[named]
    kinds = [kind.partition(";")[0].strip().lower() for kind in (accept or "").split(",")]
    return next(
        (found for kind in kinds for found in CONTAINERS.values() if found.content_type == kind),
        CONTAINERS["json"],
    )
