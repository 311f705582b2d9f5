"""An HTTP/1.1 client on the connections of aiohttp and the parser of httptools (llhttp in C).

aiohttp's connector resolves names, connects, encrypts, limits and pools connections. On each of them the protocol of
`http_response` replaces aiohttp's: the objects that aiohttp's client creates for a request, and its three Python calls per
chunk, cost more processor time than the rest of a minimal proxy.

The contract, in which this client equals aiohttp's:

- Only aiohttp's exceptions are raised: `ClientConnectorError` and `ConnectionTimeoutError` while nothing was sent,
  `SocketTimeoutError`, `ServerDisconnectedError`, `ClientOSError` and `ClientPayloadError` afterwards.
- A connection is reused after a complete response to a completely written request, unless either side closes it. Bytes that
  follow a response, or arrive between two, close the connection. `HttpResponse.close` closes it before the end of the body.
- A request with an idempotent method is sent once more if its connection is lost before the response.
- Interim responses are skipped. A response that arrives while the request is being written is returned.
- Redirects are not followed, and cookies are not kept.
"""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from ssl import SSLContext
from typing import Final, cast

import aiohttp
from yarl import URL

from proxy.upstream.http_response import Connection, HttpResponse

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
_WITHOUT_LENGTH: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # methods whose requests usually have no body


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
        head = _head(method, host, target, headers, body, closes=self._closes)
        is_retried = method not in _IDEMPOTENT
        while True:
            connection = await self._connected(origin, url)
            response = HttpResponse(connection, method, self._read_timeout_s)
            try:
                response.send(head, body)
                await response.wait_for_head()
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

    async def _connected(self, origin: URL, url: str) -> "Connection":
        """Return a pooled or new connection."""
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
        protocol = transport.get_protocol()
        if not isinstance(protocol, Connection):
            protocol = Connection(transport, cast("asyncio.Protocol", protocol))
            transport.set_protocol(protocol)
        protocol.pooled = pooled
        return protocol

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


def _head(
    method: str, host: str, target: str, headers: Sequence[tuple[str, str]], body: bytes | None, *, closes: bool
) -> bytes:
    """Return the request line and the headers as bytes. Raises ValueError for a line break or a null byte in one."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *[f"{name}: {value}" for name, value in headers]]
    if not any(name.lower() == "accept" for name, _ in headers):
        lines.append("Accept: */*")
    if body or method not in _WITHOUT_LENGTH:
        lines.append(f"Content-Length: {len(body or b'')}")
    if closes:
        lines.append("Connection: close")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a header or the URL contains a line break or a null byte")
    return (text + "\r\n\r\n").encode("utf-8", "ignore")  # without lone surrogates, which cannot be encoded
