"""The containers that rows come in: bytes, one row after the other, in constant memory.

Holds JSON and NDJSON. What a row holds is its format's business.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson


class Container(Protocol):
    """Rows as bytes: the opening, each row, the closing."""

    content_type: str

    def opening(self, format_name: str) -> bytes:
        """What comes before the first row."""
        ...

    def row(self, row: Mapping[str, Any], *, first: bool) -> bytes:
        """One row."""
        ...

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """What comes after the last row, with a report of what was left out if one is wanted."""
        ...


class Json:
    """One object: `{"format": …, "rows": […], "report": …}`."""

    content_type = "application/json"

    def opening(self, format_name: str) -> bytes:
        """The object up to its rows."""
        return b'{"format":' + orjson.dumps(format_name) + b',"rows":['

    def row(self, row: Mapping[str, Any], *, first: bool) -> bytes:
        """One row, after a comma if it is not the first."""
        return (b"" if first else b",") + orjson.dumps(row)

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """The end of the rows and of the object."""
        return b"]}" if report is None else b'],"report":' + orjson.dumps(report) + b"}"


class Ndjson:
    """One row a line; a report is a last line `{"report": …}`."""

    content_type = "application/x-ndjson"

    def opening(self, format_name: str) -> bytes:
        """Nothing."""
        return b""

    def row(self, row: Mapping[str, Any], *, first: bool) -> bytes:
        """One line."""
        return orjson.dumps(row) + b"\n"

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """The report, if one is wanted."""
        return b"" if report is None else orjson.dumps({"report": report}) + b"\n"


CONTAINERS: dict[str, Container] = {
    "json": Json(),
    "ndjson": Ndjson(),
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
