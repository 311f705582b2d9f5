"""Server-sent events: a byte stream split into events, independent of how it is split into reads.

Events are not interpreted. An event keeps its raw bytes, so an unchanged event is forwarded byte for byte.

Rule 1: an event ends with a blank line; lines end in LF, CRLF or CR (the HTML standard, section 9.2.6).
Rule 2: the raw bytes of all events, joined, are the bytes that were fed; nothing is lost, added or reordered.
Rule 3: each byte is searched and copied a constant number of times, however long an event is; its length is limited.
"""

import re
from functools import partial
from typing import Final, NamedTuple

from proxy.errors import EngineEventTooLong

_LINE_END = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK_LINE = re.compile(_LINE_END + _LINE_END)
MAX_EVENT_BYTES: Final = 2**26  # all prompt ids and top logprobs of the longest answers, in one event


class StreamFormat(NamedTuple):
    """The content type of a stream, and the bytes without meaning that are sent to a waiting client."""

    content_type: str
    keep_alive: bytes


EVENT_STREAM: Final = StreamFormat("text/event-stream; charset=utf-8", b": keep-alive\n\n")


class Event(NamedTuple):  # made for each event of each stream: a frozen dataclass takes three times as long to make
    """One event. A block of comments alone has neither name nor payload."""

    raw: bytes  # with the blank line that ends it
    payload: bytes  # its data lines, joined by LF
    name: bytes = b""  # the value of its `event:` field
    before: bytes = b"data: "  # the bytes before the payload, if it is a single line: another can be placed there
    after: bytes = b"\n\n"  # and after it


_event = partial(tuple.__new__, Event)  # as `Event` is made, in C
_BLANK: Final = Event(b"\n\n", b"")  # of a stream of line ends, which has very many of them


def read_event(raw: bytes) -> Event:
    """Parse the raw bytes of one event."""
    payload: list[bytes] = []
    name = b""
    if b"data" in raw or b"event" in raw:
        for line in raw.splitlines():  # which splits bytes at LF, CRLF and CR only
            field, _, value = line.partition(b":")
            if field == b"data":
                payload.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
    end = b"\r\n" if raw.endswith(b"\r\n") else b"\n"
    before = b"event: %b%bdata: " % (name, end) if name else b"data: "
    return _event((raw, b"\n".join(payload), name, before, end + end))


class EventParser:
    """Splits bytes into events: feed it each read, then `finish`.

    The work is linear in the number of bytes, however they are split into reads. `limit`: maximum bytes of one event.
    """

    __slots__ = ("_limit", "rest")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self.rest = bytearray()  # the event that is not complete yet

    def feed(self, read: bytes) -> list[Event]:
        """Return the events that this read completes. Raises EngineEventTooLong; the parser is unusable afterwards."""
        rest = self.rest
        if not rest:
            is_one_line = read.startswith(b"data: ") and read.endswith(b"\n\n") and b"\r" not in read
            if is_one_line and read.find(b"\n") == len(read) - 2:  # what engines send, in the reads that they come in
                return [_event((read, read[6:-2], b"", b"data: ", b"\n\n"))]
            return self._cut(read, 0)
        # A line end has at most two bytes, so three of what is pending can belong to a blank line that ends in this read.
        scanned = max(len(rest) - 3, 0)
        is_whole = _ends_an_event(bytes(rest[scanned:]) + read)
        rest += read
        if not is_whole:
            if len(rest) > self._limit:
                rest.clear()  # so that it is not parsed
                raise EngineEventTooLong(
                    f"The engine sent an event of more than {self._limit} bytes (engines.max_event_bytes)"
                )
            return []
        whole = bytes(rest)
        rest.clear()
        return self._cut(whole, scanned)

    def finish(self) -> Event | None:
        """Return the bytes after the last blank line as a truncated event; None if there are none."""
        rest = bytes(self.rest)
        self.rest.clear()
        return read_event(rest) if rest else None

    def _cut(self, text: bytes, scanned: int) -> list[Event]:
        """Return the events of a text; keep what follows the last one. Its first `scanned` bytes contain no blank line."""
        if b"\r" not in text:  # what engines send: found without the search for three kinds of line ends
            *whole, last = text.split(b"\n\n")
            self.rest += last
            return [
                _BLANK
                if not raw
                else _event((raw + b"\n\n", raw[6:], b"", b"data: ", b"\n\n"))
                if raw.startswith(b"data: ") and b"\n" not in raw
                else read_event(raw + b"\n\n")
                for raw in whole
            ]
        events: list[Event] = []
        start = 0
        for found in _BLANK_LINE.finditer(text, scanned):
            first, end = found.span()
            if end == len(text) and text.endswith(b"\r"):
                break  # a LF that belongs to this CR may be in the next read
            raw = text[start:end]
            events.append(Event(raw, b"") if first == start else read_event(raw))
            start = end
        self.rest += text[start:]
        return events


def _ends_an_event(text: bytes) -> bool:
    """Return whether a blank line certainly ends in these bytes."""
    if b"\r" not in text:
        return b"\n\n" in text
    found = _BLANK_LINE.search(text)
    return found is not None and not (found.end() == len(text) and text.endswith(b"\r"))
