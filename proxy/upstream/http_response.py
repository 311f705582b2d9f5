"""Responses of engines: their bytes are parsed as they arrive, and read at the pace of the reader.

- The parser is as lenient as that of aiohttp's client. A header has at most 8,190 bytes, a response at most 128 headers.
- Reading from the connection pauses while more than 512 KiB wait for `HttpResponse.read`.
- What arrived before an error is returned before the error is raised.
"""

import asyncio
from typing import Final

import aiohttp
from aiohttp.http_exceptions import ContentLengthError, TransferEncodingError
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

from proxy.upstream.decoding import CODINGS, Decoder

_MAX_WAITING_BYTES: Final = 2**19
_WRITE_BYTES: Final = 2**18  # larger bodies are written in parts, at the pace at which the engine reads them
_MAX_HEADER_BYTES: Final = 8190
_MAX_HEADERS: Final = 128
_MAX_UNPARSED_BYTES: Final = 2**14  # of a header, a trailer or a chunk's size that has not ended


class Connection(asyncio.Protocol):
    """A connection, and the response that it receives."""

    __slots__ = ("_drained", "_is_paused", "_pool_protocol", "pooled", "response", "transport")

    def __init__(self, transport: asyncio.Transport, pool_protocol: asyncio.Protocol) -> None:
        self.transport = transport
        self.pooled: aiohttp.connector.Connection | None = None  # while it is not in the pool
        self.response: HttpResponse | None = None
        self._pool_protocol = pool_protocol  # aiohttp's, by which its pool knows that the connection is open
        self._is_paused = False
        self._drained: asyncio.Future[None] | None = None

    def release(self, *, reusable: bool) -> None:
        """Return the connection to the pool, or close it."""
        self.response = None
        pooled, self.pooled = self.pooled, None
        if pooled is not None:
            if reusable:
                pooled.release()
            else:
                pooled.close()

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response. No data may arrive between responses."""
        if self.response is None:
            self.transport.close()
        else:
            self.response.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response, and inform the pool."""
        self._pool_protocol.connection_lost(exc)
        self.resume_writing()
        if self.response is not None:
            self.response.lost(exc)

    def pause_writing(self) -> None:
        """Let `drain` wait."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Let `drain` continue."""
        self._is_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self) -> None:
        """Wait until the engine has read enough of what was written, or the connection is lost."""
        if self._is_paused:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained


class HttpResponse:
    """A response: status and headers, then its body by `read`. It has to be closed."""

    def __init__(self, connection: Connection, method: str, read_timeout_s: float | None) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection: Connection | None = connection
        self._method = method
        self._fields: list[tuple[str, str]] = []  # headers, then trailers
        self._chunks: list[bytes] = []
        self._body_bytes = self._waiting_bytes = self._unparsed_bytes = 0
        self._has_head = self._is_bodyless = self._is_complete = self._is_reusable = self._is_paused = False
        self._error: Exception | None = None
        self._decoder: Decoder | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._read_timeout_s = read_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._last_read = 0.0
        connection.response = self
        self.on_body = self._chunks.append  # the parser calls the methods with this prefix
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    def send(self, head: bytes, body: bytes | None) -> None:
        """Write the request; a large body in parts, in a task, while the response may already arrive."""
        assert self._connection is not None
        if body is None or len(body) <= _WRITE_BYTES:
            self._connection.transport.write(head + body if body else head)
            self._start_timer()
        else:
            self._connection.transport.write(head)
            self._writing = asyncio.get_running_loop().create_task(self._write(self._connection, body))

    async def _write(self, connection: Connection, body: bytes) -> None:
        view = memoryview(body)
        for start in range(0, len(view), _WRITE_BYTES):
            await connection.drain()
            if self._connection is None or connection.transport.is_closing():
                return  # `lost` has the reason
            connection.transport.write(view[start : start + _WRITE_BYTES])
        self._start_timer()

    async def wait_for_head(self) -> None:
        """Wait until `status` and `headers` have arrived. Raises as `HttpClient.request`."""
        while not self._has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """Return what has arrived of the body since the last call, or wait for more; b"" at the end.

        Raises:
            aiohttp.ClientError, TimeoutError: The rest of the body will not arrive, or cannot be decoded.
        """
        while True:
            if self._decoder is not None and self._decoder.is_busy:
                await asyncio.sleep(0)  # a small body may become a very large one
            if taken := self._taken() if self._decoder is None else self._decoded(self._decoder):
                return taken
            if self._chunks:
                continue
            if self._error is not None:
                raise self._error
            if self._is_complete:
                if self._decoder is not None:
                    self._decoder.check_end()
                return b""
            await self._wait()

    def _taken(self) -> bytes:
        """Return and forget the received body, and resume reading."""
        chunks = self._chunks
        taken = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._body_bytes += len(taken)
        self._waiting_bytes = 0
        if self._is_paused:
            self._resume()
        return taken

    def _decoded(self, decoder: Decoder) -> bytes:
        return decoder.decode(b"" if decoder.is_busy else self._taken())

    def _resume(self) -> None:
        self._is_paused = False
        if self._connection is not None and not self._connection.transport.is_closing():
            self._last_read = asyncio.get_running_loop().time()
            self._connection.transport.resume_reading()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def close(self) -> None:
        """Close the connection, unless the response is complete."""
        self._end(reusable=False)

    def _end(self, *, reusable: bool) -> None:
        if self._is_paused:
            self._resume()  # the next response needs it
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._parser = None  # it refers to this object
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            reusable = False
        connection.release(reusable=reusable)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._end(reusable=False)
        self._wake()

    def feed(self, data: bytes) -> None:
        """Parse bytes of the engine."""
        before = len(self._fields) + len(self._chunks)
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self._is_complete:
                self._fail(aiohttp.ClientPayloadError(f"Invalid HTTP response: {error.__context__ or error}"))
                return
            self._is_reusable = False  # bytes follow the response
        if self._is_complete:
            if self._is_bodyless:
                self._chunks.clear()
            self._end(reusable=self._is_reusable)
        else:
            self._check_sizes(len(data), is_progress=before != len(self._fields) + len(self._chunks))
        self._wake()

    def _check_sizes(self, size: int, *, is_progress: bool) -> None:
        """Pause reading if `read` is slow. Fail if a header, a trailer or the framing of a chunk does not end."""
        if self._read_timeout_s is not None:
            self._start_timer()
        self._waiting_bytes += size
        if self._waiting_bytes > _MAX_WAITING_BYTES and self._has_head and not self._is_paused:
            assert self._connection is not None
            self._is_paused = True
            self._connection.transport.pause_reading()
        self._unparsed_bytes = 0 if is_progress else self._unparsed_bytes + size
        if self._unparsed_bytes > _MAX_UNPARSED_BYTES:
            self._fail(aiohttp.ClientPayloadError(f"Invalid HTTP response: a header exceeds {_MAX_HEADER_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """Begin a response, which may be the final one after an interim one."""
        if self._is_complete:
            raise ValueError("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header or a trailer."""
        if len(name) + len(value) > _MAX_HEADER_BYTES:
            raise ValueError(f"a header exceeds {_MAX_HEADER_BYTES} bytes")
        if len(self._fields) == 2 * _MAX_HEADERS or (len(self._fields) == _MAX_HEADERS and not self._has_head):
            raise ValueError(f"more than {_MAX_HEADERS} headers")
        if 0 in value:
            raise ValueError("a header contains a null byte")
        text = value.rstrip(b" \t").decode("utf-8", "surrogateescape")
        self._fields.append((name.decode("utf-8", "surrogateescape"), text))

    def on_headers_complete(self) -> None:
        """Set the status and the headers, unless the response is an interim one."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if 100 <= status <= 199 and status != 101:
            self._fields.clear()
            return
        self.status, self.headers = status, CIMultiDict(self._fields)
        self._is_complete = self._is_bodyless = self._method == "HEAD" or status == 101
        self._is_reusable = not self._is_bodyless and self._parser.should_keep_alive()
        coding = self.headers.get("Content-Encoding")
        if coding is not None and coding.lower() in CODINGS:
            self._decoder = Decoder(coding.lower())
        self._has_head = True

    def on_message_complete(self) -> None:
        """Complete the response, unless it was an interim one."""
        self._is_complete = self._has_head

    def lost(self, exc: Exception | None) -> None:
        """End the response with its connection, which may be the regular end of its body."""
        if not self._has_head:
            self._fail(aiohttp.ServerDisconnectedError() if exc is None else aiohttp.ClientOSError(*exc.args))
        elif exc is None and self._missing() is None:
            self._is_complete = True
            self._end(reusable=False)
            self._wake()
        else:
            reason = ". ".join(repr(each) for each in (self._missing(), exc) if each is not None)
            self._fail(aiohttp.ClientPayloadError(f"Response payload is not completed: {reason}"))

    def _missing(self) -> Exception | None:
        """Return which length the body does not have; None if it lasts until the connection is closed."""
        coding = ",".join(self.headers.getall("Transfer-Encoding", ())).rpartition(",")[2].strip().lower()
        if coding == "chunked":
            return TransferEncodingError("Not enough data to satisfy transfer length header.")
        length = self.headers.get("Content-Length")
        if coding or length is None:
            return None
        received = self._body_bytes + sum(map(len, self._chunks))
        return ContentLengthError(
            f"Not enough data to satisfy content length header (received {received} of {length} bytes)."
        )

    def _start_timer(self) -> None:
        """Measure the read timeout from now."""
        if self._read_timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._last_read = loop.time()
            if self._timer is None and self._connection is not None:
                self._timer = loop.call_later(self._read_timeout_s, self._check_timeout, self._read_timeout_s)

    def _check_timeout(self, read_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        idle_s = 0.0 if self._is_paused else loop.time() - self._last_read
        if idle_s >= read_timeout_s:
            self._fail(aiohttp.SocketTimeoutError("Timeout on reading data from socket"))
        else:
            self._timer = loop.call_later(read_timeout_s - idle_s, self._check_timeout, read_timeout_s)
