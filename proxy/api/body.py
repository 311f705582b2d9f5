"""Request bodies: received within limits, decompressed, and parsed as JSON objects that can be forwarded unchanged.

aiohttp's own decompression is disabled (`server`): it limits only the whole body, and reports other codings as bad JSON.
Bytes are reserved before they are received or inflated, and stay reserved until the request has its response.
`_check_weight` limits memory and time before parsing, because a small text can become a very large object.
"""

import asyncio
import re
import zlib
from collections.abc import Callable
from typing import Any, Final, Protocol

import orjson
import zstandard
from aiohttp import web
from pydantic import FailFast, ValidationError

from proxy.api.context import CONTEXT
from proxy.api.in_flight import ByteReservation
from proxy.errors import BadRequest, RequestTimeout, RequestTooLarge, UnsupportedEncoding
from proxy.protocols.json_texts import QUOTE_WEIGHT, WEIGHTS, most_weight
from proxy.upstream.concurrency import LARGE_BYTES, off_loop

RESERVED: Final = web.RequestKey("reserved", ByteReservation)

_MAX_RATIO: Final = 100  # text of agents compresses 3 to 20 times, long repetitions 50 times
_ANY_RATIO_BYTES: Final = 2**20
_FIRST_PIECE_BYTES: Final = 2**16  # inflated on the loop, in a fraction of a millisecond
_PIECE_BYTES: Final = 2**20
_SLICE_BYTES: Final = 2**16
_JOIN_BYTES: Final = 2**20  # joined on the loop, in a fraction of a millisecond
_ZSTD_WINDOW_BYTES: Final = 2**23  # the most that RFC 9659 allows a sender
_MAX_MEMBERS: Final = 1000  # of one gzip body; each costs time, and may be empty
_BROKEN: Final = (EOFError, zlib.error, zstandard.ZstdError)  # of a stream that cannot be inflated


async def read_bytes(request: web.Request, *, most: int | None = None) -> bytes:
    """Return the body, decompressed, of at most `most` bytes, if that is less than the configured limit.

    Its bytes stay reserved until the request has its response (`failures`). Raises RequestTooLarge, RequestTimeout,
    UnsupportedEncoding, Overloaded, or BadRequest if it cannot be decompressed.
    """
    context = request.app[CONTEXT]
    agents, coding = context.settings.agents, _coding(request) if "Content-Encoding" in request.headers else None
    reserved = request.get(RESERVED)
    if reserved is None:
        reserved = request[RESERVED] = ByteReservation(context.memory_limit)
    most = min(most or agents.max_body_bytes, agents.max_body_bytes)
    try:
        if request.content.is_eof():
            received = await _received(request, reserved, most)
        else:
            async with asyncio.timeout(agents.body_timeout_s):
                received = await _received(request, reserved, most)
    except TimeoutError:
        raise RequestTimeout(
            f"Receiving the request body timed out after {agents.body_timeout_s:g} s (agents.body_timeout_s)."
        ) from None
    except web.RequestPayloadError:
        raise BadRequest("The request body does not match its Content-Length or Transfer-Encoding header.") from None
    if coding is None or not received:
        return received
    try:
        return await _inflated(_SOURCES[coding](received), len(received), reserved, most)
    except _BROKEN:
        raise BadRequest(f"The request body cannot be decompressed (Content-Encoding: {coding}).") from None


async def _received(request: web.Request, reserved: ByteReservation, most: int) -> bytes:
    """Receive the body. An announced length is reserved at once, so that a body that does not fit is rejected early."""
    announced = request.content_length or 0
    if announced > most:
        raise _too_long(most)
    reserved.grow(announced)
    reads, received, counted = [], 0, announced
    while read := await request.content.readany():
        received += len(read)
        if received > most:
            raise _too_long(most)
        if received > counted:
            reserved.grow(received - counted)
            counted = received
        reads.append(read)
    return reads[0] if len(reads) == 1 else await off_loop(received, _JOIN_BYTES, b"".join, reads)


async def _inflated(source: "_Source", packed: int, reserved: ByteReservation, most: int) -> bytes:
    """Return all bytes of a source: at most `most`, and at most `_MAX_RATIO` times the received ones."""
    by_ratio = max(packed * _MAX_RATIO, _ANY_RATIO_BYTES)
    body, piece = bytearray(), _FIRST_PIECE_BYTES
    while True:
        reserved.grow(piece)
        read = source.read(piece) if piece == _FIRST_PIECE_BYTES else await asyncio.to_thread(source.read, piece)
        reserved.grow(len(read) - piece)
        if not read:
            return await off_loop(len(body), LARGE_BYTES, bytes, body)
        body += read
        if len(body) > most:
            raise _too_long(most)
        if len(body) > by_ratio:
            raise RequestTooLarge(f"The request body decompresses to more than {_MAX_RATIO} times its {packed} bytes.")
        piece = _PIECE_BYTES


def _too_long(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body exceeds the limit of {most} bytes (agents.max_body_bytes).")


def _coding(request: web.Request) -> str | None:
    """Return the content coding, None for identity. Raises UnsupportedEncoding."""
    coding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in _SOURCES:
        raise UnsupportedEncoding(f"Unsupported Content-Encoding; use {', '.join(_SOURCES)} or identity.")
    return coding


class _Source(Protocol):
    def read(self, size: int, /) -> bytes:
        """Return up to `size` inflated bytes; none at the end."""
        ...


class _Zlib:
    """A gzip or deflate body. gzip may have several members; a deflate body is one stream."""

    def __init__(self, packed: bytes, window: int, members: int) -> None:
        self._packed = memoryview(packed)
        self._at = 0
        self._window = window
        self._members = members
        self._inflate = zlib.decompressobj(window)
        self._tail = b""
        self._is_drained = False  # zlib may keep output back although it has consumed all input

    def read(self, size: int, /) -> bytes:
        """See `_Source`. Raises zlib.error or EOFError."""
        while True:
            if not self._tail:
                self._tail = bytes(self._packed[self._at : self._at + _SLICE_BYTES])
                self._at += len(self._tail)
            if not self._tail and self._inflate.eof:
                return b""
            if not self._tail and self._is_drained:
                raise EOFError("the compressed stream is truncated")
            if self._inflate.eof:
                self._next_member()
            read = self._inflate.decompress(self._tail, size)
            self._tail = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            self._is_drained = not read
            if read:
                return read

    def _next_member(self) -> None:
        self._members -= 1
        if not self._members:
            raise EOFError("trailing bytes after the compressed stream")
        self._inflate = zlib.decompressobj(self._window)


def _gzip(packed: bytes) -> _Source:
    return _Zlib(packed, 16 + zlib.MAX_WBITS, _MAX_MEMBERS)


def _deflate(packed: bytes) -> _Source:
    """Read a body with zlib's header, as in the standard, or without it, as some clients send it."""
    has_header = len(packed) > 1 and packed[0] & 15 == zlib.DEFLATED and (packed[0] * 256 + packed[1]) % 31 == 0
    return _Zlib(packed, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS, 1)


def _zstd(packed: bytes) -> _Source:
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    source: _Source = reader.stream_reader(packed, read_across_frames=True)
    return source


_SOURCES: Final[dict[str, Callable[[bytes], _Source]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}


MAX_DEPTH: Final = 200  # orjson writes 254 levels; records and responses of TokenTape wrap a body in a few
_FIRST_INEXACT: Final = 2.0**63
_LONG_DIGITS: Final = 19  # an integer of fewer digits fits into 64 bits
_MAX_DIGITS: Final = 309  # of the greatest float; orjson rejects longer integer literals
_MAX_FIELDS: Final = 1000  # the top level of a body is copied while a call is planned
_MAX_FAULTS: Final = 1000
_FAULT_FIELDS: Final = ("type", "loc", "msg", "input")
_SHORT: Final = 100
_MAX_RUNS: Final = 100_000  # which takes a tenth of a second
_DIGITS_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_DIGITS: Final = re.compile(rb"\d+")
_MAX_QUOTES: Final = 400_000  # at most this many, because the text is split at them
# With these, orjson takes at most 75 ms for a body of 32 MiB, during which no other thread runs (docs/decisions/098).
_FREE_WEIGHT: Final = 28 * 2**20  # of 600,000 token ids, or 40,000 short messages
_WEIGHT_PER_BYTE: Final = 1
_LIGHT_BYTES: Final = _FREE_WEIGHT // (max(WEIGHTS.values()) - _WEIGHT_PER_BYTE)  # no body of at most this is too heavy


def read_body(text: bytes, weight: int | None = None) -> dict[str, Any]:
    """Return the body as a dict; the last of duplicate keys wins, as in engines. Raises BadRequest.

    `weight`: its `most_weight`, if that is known.
    """
    if not text:
        raise BadRequest("The request body is empty; send a JSON object.")
    if len(text) > _LIGHT_BYTES:
        _check_weight(text, weight)
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_kind(body)}.")
    if len(body) > _MAX_FIELDS:
        raise BadRequest(f"The request body has {len(body)} fields; the maximum is {_MAX_FIELDS}.")
    inexact = _inexact(body)
    if inexact and (found := _long_integer(text, inexact)) is not None:
        raise BadRequest(
            f"Integer {found} does not fit into 64 bits and cannot be forwarded unchanged; send it as a string."
        )
    return body


class _FirstFault(FailFast):
    __hash__ = object.__hash__  # pydantic's own has none, which unions require


FIRST_FAULT: Final = _FirstFault()  # for lists in models: only the first invalid item of a long list is reported


def faults_of(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors of a body as in pydantic: type, loc, msg, input. Very many are summarized in one.

    Long inputs are omitted, so that the response does not repeat the body for each error.
    """
    count = error.error_count()
    if count > _MAX_FAULTS:
        return [{"type": "too_many_faults", "loc": (), "msg": f"{count} values are invalid"}]
    faults = error.errors(include_url=False, include_context=False)
    return [
        {name: fault[name] for name in _FAULT_FIELDS if name != "input" or _is_short(fault["input"])}
        for fault in faults
    ]


def _is_short(value: Any) -> bool:
    if isinstance(value, str | list | dict):
        return len(value) <= _SHORT and all(
            not isinstance(part, str | list | dict) or len(part) <= _SHORT
            for part in (value.values() if isinstance(value, dict) else value)
        )
    return True


def _check_weight(text: bytes, weight: int | None) -> None:
    """Raise RequestTooLarge for a body with so many values that parsing it would take many times its length in memory.

    The passes are in C: all characters are counted first; if there are too many, those outside of strings.
    """
    most = _FREE_WEIGHT + _WEIGHT_PER_BYTE * len(text)
    if (most_weight(text) if weight is None else weight) <= most or _weight(text, _quotes_in(text)) <= most:
        return
    quotes = _quotes(text)
    if quotes > _MAX_QUOTES or _weight(b"".join(_unescaped(text).split(b'"')[::2]), quotes) > most:
        raise RequestTooLarge(
            f"The request body has too many JSON values for its length of {len(text)} bytes: "
            f"parsing it would take more than {most} bytes of memory. Send fewer or longer values."
        )


def _weight(text: bytes, quotes: int) -> int:
    return QUOTE_WEIGHT * quotes + sum(weight * text.count(character) for character, weight in WEIGHTS.items())


def _quotes_in(text: bytes) -> int:
    """Count the quotes that begin or end a string; the count is too low if strings end in a backslash."""
    return text.count(b'"') - text.count(b'\\"')


def _unescaped(text: bytes) -> bytes:
    """Remove escaped backslashes and quotes, so that every quote begins or ends a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _inexact(body: dict[str, Any]) -> set[float]:
    """Return the floats so large that each may have been an integer. Raises BadRequest for a body that is nested too deep."""
    level: list[Any] = [body]
    found: set[float] = set()
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value if set(map(type, value)) - {int, str} else ())
            elif type(value) is float and abs(value) >= _FIRST_INEXACT:
                found.add(value)
        if not below:
            return found
        level = below
    raise BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.")


def _long_integer(text: bytes, inexact: set[float]) -> str | None:
    """Return the first integer literal beyond 64 bits, if there is one (a float such as 1e30 is none).

    orjson returns such an integer as the nearest float, so only literals of a value in `inexact` count. Long runs of digits
    are found without a regular expression, which is slow on a large text. Raises BadRequest for too many of them.
    """
    zeros, run = text.translate(_DIGITS_AS_ZEROS), b"0" * _LONG_DIGITS
    start, checked, quotes = zeros.find(run), 0, 0
    for _ in range(_MAX_RUNS):
        if start < 0:
            return None
        digits = _DIGITS.match(text, start)
        assert digits is not None
        end = digits.end()
        literal = _integer_at(text, start, end)
        if literal is not None and not -(2**63) <= int(literal) < 2**64 and float(literal) in inexact:
            quotes += _quotes(text[checked:start])
            checked = start
            if quotes % 2 == 0:  # else these digits are part of a string
                return literal.decode()
        start = zeros.find(run, end)
    raise BadRequest(
        f"The request body has an integer beyond 64 bits and more than {_MAX_RUNS} long sequences of "
        "digits; send such integers as strings."
    )


def _quotes(text: bytes) -> int:
    return _unescaped(text).count(b'"')


def _integer_at(text: bytes, start: int, end: int) -> bytes | None:
    """Return the integer literal of these digits, with its sign; None if they are a part of a float, or of a long text."""
    before, after = text[max(start - 2, 0) : start], text[end : end + 1]
    is_negative = before.endswith(b"-")
    is_part = before.endswith((b".", b"+", b"e", b"E")) or before in (b"e-", b"E-") or after in (b".", b"e", b"E")
    if is_part or end - start > _MAX_DIGITS:
        return None
    return text[start - is_negative : end]


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
