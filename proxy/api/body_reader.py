"""Reading of request bodies from the connection: limited, decompressed, and counted before the memory is used.

aiohttp's own decompression is disabled (`server`): it limits only the whole body, and reports other codings as bad JSON.
Bytes are reserved before they are received or inflated, and stay reserved until the request has its response.
"""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final, Protocol

import zstandard
from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.memory_limit import ByteReservation
from proxy.errors import BadRequest, RequestTimeout, RequestTooLarge, UnsupportedEncoding
from proxy.upstream.concurrency import off_loop

RESERVED: Final = web.RequestKey("reserved", ByteReservation)

_MOST_RATIO: Final = 100  # text of agents compresses 3 to 20 times, long repetitions 50 times
_ANY_RATIO_BYTES: Final = 2**20
_FIRST_PIECE_BYTES: Final = 2**16  # inflated on the loop, in a fraction of a millisecond
_PIECE_BYTES: Final = 2**20
_SLICE_BYTES: Final = 2**16
_ZSTD_WINDOW_BYTES: Final = 2**23  # the most that RFC 9659 allows a sender
_MOST_MEMBERS: Final = 1000  # of one gzip body; each costs time, and may be empty
_BROKEN: Final = (EOFError, zlib.error, zstandard.ZstdError)  # of a stream that cannot be inflated


async def read_bytes(request: web.Request, *, most: int | None = None) -> bytes:
    """Return the body, decompressed, of at most `most` bytes where that is less than the configured limit.

    Its bytes stay reserved until `release`.

    Raises RequestTooLarge, RequestTimeout, UnsupportedEncoding, Overloaded, or BadRequest if it cannot be decompressed.
    """
    agents, coding = request.app[CONTEXT].settings.agents, _coding(request)
    reserved = request.get(RESERVED)
    if reserved is None:
        reserved = request[RESERVED] = request.app[CONTEXT].memory_limit.reserve()
    most = min(most or agents.max_body_bytes, agents.max_body_bytes)
    try:
        async with nullcontext() if request.content.is_eof() else asyncio.timeout(agents.body_timeout_s):
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


def release(request: web.Request) -> None:
    """Release the bytes that the request's body reserved."""
    if (reserved := request.get(RESERVED)) is not None:
        reserved.release()


async def _received(request: web.Request, reserved: ByteReservation, most: int) -> bytes:
    """Receive the body. An announced length is reserved at once, so that a body that does not fit is rejected early."""
    announced = request.content_length or 0
    if announced > most:
        raise _too_long(most)
    reserved.grow(announced)
    body, counted = bytearray(), announced
    while read := await request.content.readany():
        if len(body) + len(read) > most:
            raise _too_long(most)
        reserved.grow(max(len(body) + len(read) - counted, 0))
        body += read
        counted = max(counted, len(body))
    return await off_loop(len(body), bytes, body)


async def _inflated(source: "_Source", packed: int, reserved: ByteReservation, most: int) -> bytes:
    """Return all bytes of a source: at most `most`, and at most `_MOST_RATIO` times the received ones."""
    by_ratio = max(packed * _MOST_RATIO, _ANY_RATIO_BYTES)
    body, piece = bytearray(), _FIRST_PIECE_BYTES
    while True:
        reserved.grow(piece)
        read = source.read(piece) if piece == _FIRST_PIECE_BYTES else await asyncio.to_thread(source.read, piece)
        reserved.grow(len(read) - piece)
        if not read:
            return await off_loop(len(body), bytes, body)
        body += read
        if len(body) > most:
            raise _too_long(most)
        if len(body) > by_ratio:
            raise RequestTooLarge(f"The request body decompresses to more than {_MOST_RATIO} times its {packed} bytes.")
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
    return _Zlib(packed, 16 + zlib.MAX_WBITS, _MOST_MEMBERS)


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
