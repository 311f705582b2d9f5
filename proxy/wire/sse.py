"""Server-sent events: bytes in, whole events out, however the bytes were cut.

Holds the cutting of a byte stream into events and nothing of what an event means. An event keeps its raw bytes, so that
what is passed on unchanged is passed on byte for byte.

Rule 1: an event ends with a blank line; lines end in LF, CRLF or CR (the HTML standard, section 9.2.6).
Rule 2: the raw bytes of all events, joined, are the bytes that were fed; nothing is lost, added or reordered.
"""

import re
from functools import partial
from typing import NamedTuple

_LINE_END = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK_LINE = re.compile(_LINE_END + _LINE_END)
_LINES = re.compile(_LINE_END)
_LF = 10


class Event(NamedTuple):  # made for each event of each stream: a frozen dataclass takes three times as long to make
    """One event. `raw` is its bytes with the blank line that ends it; `payload` its data lines, joined by LF.

    `name` is the value of its `event:` field. A block of comments alone has neither name nor payload.
    """

    raw: bytes
    payload: bytes
    name: bytes = b""

    def with_payload(self, payload: bytes) -> bytes:
        """The bytes of this event carrying another payload (a single line)."""
        if not self.name and self.raw.endswith(b"\n\n"):
            return b"data: " + payload + b"\n\n"
        end = b"\r\n" if self.raw.endswith(b"\r\n") else b"\n"
        name = b"event: " + self.name + end if self.name else b""
        return name + b"data: " + payload + end + end


_event = partial(tuple.__new__, Event)  # as `Event` is made, in C


def _is_one_data_line(raw: bytes) -> bool:
    """Whether this is the one shape that engines send: an event that is a single data line."""
    return raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and raw[-1] == _LF and b"\r" not in raw


def read_event(raw: bytes) -> Event:
    """Understand the raw bytes of one event."""
    if _is_one_data_line(raw):
        return Event(raw, raw[6:-2])
    payload: list[bytes] = []
    name = b""
    for line in _LINES.split(raw):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            payload.append(value)
        elif field == b"event":
            name = value
    return Event(raw, b"\n".join(payload), name)


class EventCutter:
    """Cuts bytes into events. Feed it as they come; ask for the rest when no more come."""

    __slots__ = ("_rest", "_scanned")

    def __init__(self) -> None:
        self._rest = b""
        self._scanned = (
            0  # how far `_rest` is known to hold no blank line: long events are not searched again and again
        )

    def feed(self, read: bytes) -> list[Event]:
        """The events that are whole now."""
        rest = self._rest + read if self._rest else read
        if _is_one_data_line(rest):  # what engines send, in the reads that they come in
            self._rest, self._scanned = b"", 0
            return [_event((rest, rest[6:-2], b""))]
        if b"\r" not in rest:  # what engines send: found without the search for three kinds of line ends
            *whole, self._rest = rest.split(b"\n\n")
            self._scanned = len(self._rest)
            return [
                _event((raw + b"\n\n", raw[6:], b""))
                if raw.startswith(b"data: ") and b"\n" not in raw
                else read_event(raw + b"\n\n")
                for raw in whole
            ]
        events: list[Event] = []
        start = 0
        position = max(self._scanned - 3, 0)
        while (found := _BLANK_LINE.search(rest, position)) is not None:
            end = found.end()
            if end == len(rest) and rest.endswith(b"\r"):
                break  # a LF that belongs to this CR may be in the next read
            events.append(read_event(rest[start:end]))
            start = position = end
        self._rest = rest[start:]
        self._scanned = len(self._rest)
        return events

    def finish(self) -> Event | None:
        """What came after the last blank line, if anything: an event that was cut off."""
        rest, self._rest = self._rest, b""
        self._scanned = 0
        return read_event(rest) if rest else None
