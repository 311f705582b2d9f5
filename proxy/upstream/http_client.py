"""An HTTP/1.1 client on the connections of aiohttp and the parser of httptools (llhttp in C).

aiohttp's connector resolves names, connects, encrypts, limits and pools connections. On each of them a protocol of this module
replaces aiohttp's: the objects that aiohttp's client creates for a request, and its three Python calls per chunk, cost more
processor time than the rest of a minimal proxy.

The contract, in which this client equals aiohttp's:

- Only aiohttp's exceptions are raised: `ClientConnectorError` and `ConnectionTimeoutError` while nothing was sent,
  `SocketTimeoutError`, `ServerDisconnectedError`, `ClientOSError` and `ClientPayloadError` afterwards.
- A connection is reused after a complete response to a completely written request, unless either side closes it. Bytes that
  follow a response, or arrive between two, close the connection. `HttpResponse.close` closes it before the end of the body.
- A request with an idempotent method is sent once more if its connection is lost before the response.
- Interim responses are skipped. A response that arrives while the request is being written is returned.
- Redirects are not followed, and cookies are not kept.
- The parser is as lenient as aiohttp's client. A header has at most 8,190 bytes, a response at most 128 headers.
- Reading from the connection pauses while more than 512 KiB wait for `HttpResponse.iter_bytes`.
- What arrived before an error is returned before the error is raised.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from ssl import SSLContext
from typing import Final, cast

import aiohttp
from aiohttp.http_exceptions import ContentLengthError, TransferEncodingError
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict
from yarl import URL

ROLLOUT_HEADER: Final = "X-Rollout-Id"  # names the rollout, in requests and responses
GROUP_HEADER: Final = "X-Rollout-Group"
CONTINUATION_HEADER: Final = "X-Rollout-Continuation"  # the continuation mode of one call
AGENT_HEADER: Final = "X-Agent-Name"  # names the agent of a call, which is the name of its thread
STEP_HEADER: Final = "X-Step-Id"  # of responses

HTTP_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)
MAX_DECODED_BYTES: Final = 2**18  # at a time: a small body may become a very large one

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
_WITHOUT_LENGTH: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # methods of requests that usually have no body
# Headers of one connection, not of the message (RFC 9110, 7.6.1).
HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
# API keys of TokenTape, which are never forwarded; what TokenTape sets itself; names of rollouts.
NOT_SENT: Final = HOP_BY_HOP | {
    "authorization", "x-api-key", "x-goog-api-key", "host", "content-length", "content-encoding", "accept-encoding", "expect",
    ROLLOUT_HEADER.lower(), GROUP_HEADER.lower(), CONTINUATION_HEADER.lower(), "x-reply-tokens", "x-reply-ids",
    AGENT_HEADER.lower(),
}  # fmt: skip
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # invalid in headers (RFC 9110, 5.5)
_MAX_WAITING_BYTES: Final = 2**19
_WRITE_BYTES: Final = 2**18  # larger bodies are written in parts, at the pace at which the engine reads them
_MAX_HEADER_BYTES: Final = 8190
_MAX_HEADERS: Final = 128
_MAX_UNPARSED_BYTES: Final = 2**14  # of a header, a trailer or a chunk's size that has not ended
_MAX_MEMBERS: Final = 1000  # of one gzip body; each costs time, and may be empty
_UNSUPPORTED: Final = ("br", "zstd")
_CODINGS: Final = frozenset({"gzip", "deflate", *_UNSUPPORTED})


class HttpClient:
    """Sends requests to any origin. Create it in the event loop and `close` it.

    `keepalive_s`: how long an idle connection is kept; None closes a connection after each response.
    """

    def __init__(
        self,
        *,
        tls: bool | SSLContext,
        max_connections: int,
        keepalive_s: float | None,
        connect_timeout_s: float,
        read_timeout_s: float | None,
    ) -> None:
        self._closes = keepalive_s is None
        self._origins: dict[URL, aiohttp.ClientRequest] = {}
        self._connector = (
            aiohttp.TCPConnector(limit=max_connections, force_close=True, ssl=tls)
            if keepalive_s is None
            else aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keepalive_s, ssl=tls)
        )
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._read_timeout_s = read_timeout_s

    async def request(
        self, method: str, url: str, *, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> "HttpResponse":
        """Send a request to an encoded URL and return the response once its headers have arrived.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: See the contract of the module.
            ValueError: The URL or a header contains a line break or a null byte.
        """
        origin, host, target = _target(url)
        text = f"{method} {target} HTTP/1.1\r\nHost: {host}" + "".join(map("\r\n%s: %s".__mod__, headers))
        if text.count("\n") != len(headers) + 1 or text.count("\r") != len(headers) + 1 or "\0" in text:
            raise ValueError("a header or the URL contains a line break or a null byte")
        if "\naccept:" not in text.lower():
            text += "\r\nAccept: */*"
        if body or method not in _WITHOUT_LENGTH:
            text += f"\r\nContent-Length: {len(body or b'')}"
        text += "\r\nConnection: close\r\n\r\n" if self._closes else "\r\n\r\n"
        head = text.encode("utf-8", "ignore")  # without lone surrogates, which cannot be encoded
        is_retried = method not in _IDEMPOTENT
        while True:
            response = await self._connected(origin, url, method)
            try:
                await response.start(head, body)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                response.close()
                if is_retried:
                    raise
                is_retried = True
            except BaseException:
                response.close()
                raise
            else:
                return response

    async def _connected(self, origin: URL, url: str, method: str) -> "HttpResponse":
        """Return the response to a request that can be written now, on a pooled or new connection."""
        request = self._origins.get(origin)
        if request is None:  # only its host, port and scheme are used
            request = aiohttp.ClientRequest("GET", origin, loop=asyncio.get_running_loop())
            self._origins[origin] = request
        try:
            pooled = await self._connector.connect(request, [], self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from error
        transport = pooled.transport
        if transport is None:
            pooled.close()
            raise aiohttp.ServerDisconnectedError
        connection = transport.get_protocol()
        if not isinstance(connection, _Connection):
            connection = _Connection(transport, cast("asyncio.Protocol", connection))
            transport.set_protocol(connection)
        return HttpResponse(connection, pooled, method, self._read_timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._connector.close()


@lru_cache(1024)
def _target(url: str) -> tuple[URL, str, str]:
    """Return the origin, the Host header and the request target of an encoded URL."""
    parsed = URL(url, encoded=True)
    if not parsed.raw_host or not parsed.host_port_subcomponent:
        raise aiohttp.InvalidURL(url)
    return parsed.origin(), parsed.host_port_subcomponent, parsed.raw_path_qs


def end_to_end(
    headers: Iterable[tuple[str, str]], dropped: frozenset[str], prefixes: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return the headers that are not dropped, by their name in lower case or its prefix, and that can be written.

    `dropped` contains `HOP_BY_HOP`. A `Connection` header may list others of one connection. aiohttp accepts control characters
    in the headers of a response, and its server refuses to write them.
    """
    passing: list[tuple[str, str]] = []
    listed: set[str] = set()
    for pair in headers:
        name, value = pair
        lower = name.lower()
        if lower in dropped:
            if lower == "connection" and value.lower() not in ("keep-alive", "close"):
                listed.update(token.strip().lower() for token in value.split(","))
        elif not lower.startswith(prefixes):
            text = name + value
            if text.isprintable() or not _CONTROL.search(text):
                passing.append(pair)
    return [pair for pair in passing if pair[0].lower() not in listed] if listed else passing


class _Connection(asyncio.Protocol):
    """The protocol of a connection.

    `response` is None between two requests. `drained` is done once the connection accepts more of a large request; None if it
    does already.
    """

    __slots__ = ("_pool", "drained", "response", "transport")

    def __init__(self, transport: asyncio.Transport, pool: asyncio.Protocol) -> None:
        self.transport = transport
        self.response: HttpResponse | None = None
        self.drained: asyncio.Future[None] | None = None
        self._pool = pool  # aiohttp's protocol, by which its pool knows whether the connection is open

    def data_received(self, data: bytes) -> None:
        """Pass data to the response. No data may arrive between responses."""
        if self.response is None:
            self.transport.close()
        else:
            self.response.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Inform the pool, and end the response."""
        self._pool.connection_lost(exc)
        if self.response is not None:
            self.response.lost(exc)

    def pause_writing(self) -> None:
        """Let the writing of a large request wait until the engine has read enough."""
        self.drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let it continue."""
        drained, self.drained = self.drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)


class HttpResponse:
    """A response: status and headers, then its body by `iter_bytes`. It has to be closed.

    `iter_bytes` calls `on_end` with None after a complete body, or with its error; `on_end` returns the error that is raised.
    """

    __slots__ = (
        "_awaited", "_body_bytes", "_chunks", "_connection", "_decoder", "_error", "_fields", "_has_head", "_incomplete",
        "_is_paused", "_is_reusable", "_last_read", "_loop", "_max_fields", "_method", "_parser", "_pooled", "_timer",
        "_transport", "_unparsed_bytes", "_waiter", "_waiting_bytes", "_writing", "headers", "on_body", "on_end",
        "on_message_begin", "on_message_complete", "status",
    )  # fmt: skip

    def __init__(
        self,
        connection: _Connection,
        pooled: aiohttp.connector.Connection,
        method: str,
        read_timeout_s: float | None,
    ) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.on_end: Callable[[Exception | None], Exception | None] | None = None
        self._loop = loop = asyncio.get_running_loop()
        self._connection = connection
        self._transport = connection.transport
        # Until the connection is in the pool again or closed.
        self._pooled: aiohttp.connector.Connection | None = pooled
        self._method = method
        self._fields: list[tuple[str, str]] = []  # headers, then trailers
        self._max_fields = _MAX_HEADERS
        self._chunks: list[bytes] = []
        self._body_bytes = self._waiting_bytes = self._unparsed_bytes = 0
        self._has_head = self._is_reusable = self._is_paused = False
        self._error: Exception | None = None
        self._decoder: Decoder | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._last_read: float | None = None  # or when the request was written; None before then
        self._timer = (
            None if read_timeout_s is None else loop.call_later(read_timeout_s, self._check_timeout, read_timeout_s)
        )
        self._awaited = [None]  # an item for each message that may begin: more than one only after interim responses
        self._incomplete = [None]  # and that has to be completed
        # The parser calls the methods with this prefix; without an item it fails.
        self.on_message_begin = self._awaited.pop
        self.on_message_complete = self._incomplete.pop
        self.on_body = self._chunks.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        connection.response = self

    async def start(self, head: bytes, body: bytes | None) -> None:
        """Write the request, and return when `status` and `headers` have arrived. Raises as `HttpClient.request`.

        A large body is written in parts, in a task, while the response may already arrive.
        """
        if body is None or len(body) <= _WRITE_BYTES:
            self._transport.write(head + body if body else head)
            self._last_read = self._loop.time()
        else:
            self._transport.write(head)
            self._writing = self._loop.create_task(self._write(memoryview(body)))
        while not self._has_head:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter

    async def _write(self, body: memoryview) -> None:
        for start in range(0, len(body), _WRITE_BYTES):
            if self._connection.drained is not None:
                await self._connection.drained
            if self._transport.is_closing():
                return  # `lost` has the reason
            self._transport.write(body[start : start + _WRITE_BYTES])
        self._last_read = self._loop.time()

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        """Yield the body in chunks, as they arrive.

        Raises:
            aiohttp.ClientError, TimeoutError: The rest of the body will not arrive, or cannot be decoded.
        """
        chunks, decoder = self._chunks, self._decoder
        try:
            while chunks or self._incomplete:
                if not chunks:
                    if self._error is not None:
                        raise self._error
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    continue
                taken = b"".join(chunks)
                chunks.clear()
                self._body_bytes += len(taken)
                self._waiting_bytes = 0
                if self._is_paused:
                    self._resume()
                if decoder is None:
                    yield taken
                else:
                    for part in decoder.parts(taken):
                        yield part
                        await asyncio.sleep(0)  # other tasks run between the parts of a very large body
                taken = b""  # of thousands of open streams, nothing is kept while they wait
            if decoder is not None:
                decoder.check_end()
        except HTTP_ERRORS as error:
            translated = self.on_end and self.on_end(error)
            raise translated or error from translated and error
        if self.on_end is not None:
            self.on_end(None)

    def close(self, *, reusable: bool = False) -> None:
        """Close the connection, or return it to the pool. After a complete response that was done already."""
        pooled, self._pooled = self._pooled, None
        if pooled is None:
            return
        if self._is_paused:
            self._resume()  # the next response needs it
        self._parser = None  # it refers to this object
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            reusable = False
        self._connection.response = None
        if reusable and self._connection.drained is None:
            pooled.release()
        else:
            pooled.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self.close()

    def _resume(self) -> None:
        self._is_paused = False
        if not self._transport.is_closing():
            self._last_read = self._loop.time()
            self._transport.resume_reading()

    def feed(self, data: bytes) -> None:
        """Parse a part of the response."""
        before = len(self._fields) + len(self._chunks)
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self._incomplete:
                self._fail(aiohttp.ClientPayloadError(f"Invalid HTTP response: {error.__context__ or error}"))
                return
            self._is_reusable = False  # bytes follow the response
        if not self._incomplete:
            self.close(reusable=self._is_reusable)
            return
        self._last_read = self._loop.time()
        self._waiting_bytes += len(data)
        is_progress = before != len(self._fields) + len(self._chunks)
        self._unparsed_bytes = 0 if is_progress else self._unparsed_bytes + len(data)
        if self._waiting_bytes > _MAX_WAITING_BYTES or self._unparsed_bytes > _MAX_UNPARSED_BYTES:
            self._limit()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _limit(self) -> None:
        """Pause reading if `iter_bytes` is slow. Fail if a header, a trailer or the framing of a chunk does not end."""
        if self._unparsed_bytes > _MAX_UNPARSED_BYTES:
            self._fail(aiohttp.ClientPayloadError(f"Invalid HTTP response: a header exceeds {_MAX_HEADER_BYTES} bytes"))
        elif self._has_head and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header or a trailer."""
        if len(name) + len(value) > _MAX_HEADER_BYTES:
            raise ValueError(f"a header exceeds {_MAX_HEADER_BYTES} bytes")
        if len(self._fields) == self._max_fields:
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
            self._awaited.append(None)
            self._incomplete.append(None)
            return
        self.status, self.headers = status, CIMultiDict(self._fields)
        if self._method == "HEAD" or status == 101:
            self._has_head = True
            self._incomplete.clear()
            raise ValueError("the response has no body")  # so that none is parsed
        coding = self.headers.get("Content-Encoding")
        if coding is not None and coding.lower() in _CODINGS:
            self._decoder = Decoder(coding.lower())
        self._is_reusable = self._parser.should_keep_alive()
        self._max_fields = 2 * _MAX_HEADERS
        self._has_head = True

    def lost(self, exc: Exception | None) -> None:
        """End the response with its connection, which may be the regular end of its body."""
        if not self._has_head:
            self._fail(aiohttp.ServerDisconnectedError() if exc is None else aiohttp.ClientOSError(*exc.args))
            return
        missing = self._missing()
        if exc is None and missing is None:
            self._incomplete.clear()
            self.close()
        else:
            reason = ". ".join(repr(each) for each in (missing, exc) if each is not None)
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

    def _check_timeout(self, read_timeout_s: float) -> None:
        since = None if self._is_paused else self._last_read
        idle_s = 0.0 if since is None else self._loop.time() - since
        if idle_s >= read_timeout_s:
            self._fail(aiohttp.SocketTimeoutError("Timeout on reading data from socket"))
        else:
            self._timer = self._loop.call_later(read_timeout_s - idle_s, self._check_timeout, read_timeout_s)


class Decoder:
    """Decodes the gzip or deflate of engines that compress although the requests prohibit it (`Accept-Encoding: identity`).

    Raises ValueError for other codings.
    """

    def __init__(self, coding: str) -> None:
        if coding in _UNSUPPORTED:
            raise ValueError(f"Can not decode content-encoding: {coding}")
        self._coding = coding
        self._zlib: zlib._Decompress | None = None
        self._members = 0

    def parts(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes, at most `MAX_DECODED_BYTES` at a time. Raises aiohttp.ClientPayloadError."""
        has_more = False
        while data or has_more:
            try:
                if self._zlib is None or self._zlib.eof:
                    self._zlib = self._next_member(data)
                decoded = self._zlib.decompress(data, MAX_DECODED_BYTES)
            except zlib.error:
                raise aiohttp.ClientPayloadError(f"Can not decode content-encoding: {self._coding}") from None
            data = self._zlib.unconsumed_tail or self._zlib.unused_data
            has_more = len(decoded) == MAX_DECODED_BYTES and not self._zlib.eof
            if decoded:
                yield decoded

    def _next_member(self, data: bytes) -> "zlib._Decompress":
        if self._members == _MAX_MEMBERS:
            raise zlib.error
        self._members += 1
        if self._coding == "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        # The first byte of zlib's format (RFC 1950) ends in 8. Some servers send raw deflate instead.
        return zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0xF == 8 else -zlib.MAX_WBITS)

    def check_end(self) -> None:
        """Raise aiohttp.ClientPayloadError if a deflate stream is incomplete. An incomplete gzip stream is accepted."""
        if self._coding == "deflate" and self._zlib is not None and not self._zlib.eof:
            raise aiohttp.ClientPayloadError(f"Can not decode content-encoding: {self._coding}")
