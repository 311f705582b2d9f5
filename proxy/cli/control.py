"""The control API for commands: of a running proxy, or of one that runs on a store meanwhile. Requests are `tokentape`'s.

They are sent by http.client in threads: the import of aiohttp's client takes longer than all the rest of a command.
"""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR
from threading import Event
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson

from proxy.cli.render import prompts_of, recorded_texts
from proxy.cli.running import unreachable_hint
from proxy.errors import failure_text
from tokentape.control_api import ControlApi, path_of
from tokentape.transport import Request, Transport, authorization, error_from_response

if TYPE_CHECKING:
    from proxy.config.settings import Settings

CONNECT_TIMEOUT_S: Final = 10
MAX_TEXTS: Final = 2000  # token texts per request
_PART_BYTES: Final = 1 << 18
_SAFE: Final = "/%?&=:@!$'()*+,;~-._"  # in a path that is quoted already


class Refused(OSError):
    """A response of the proxy with status 300 or more; `reason` is the message in its body."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        self.status = status
        self.reason = error_from_response(status, {}, body).message
        super().__init__(f"{url} returned {status}: {self.reason}")


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The control API of a running proxy, or settings to open a store with."""

    url: str | None
    settings: "Settings | None"
    api_key: str | None


@asynccontextmanager
async def connected(address: ControlAddress) -> AsyncIterator["Control"]:
    """Yield the control API. With settings, run a proxy on their store meanwhile."""
    url, api_key = address.url, address.api_key
    async with AsyncExitStack() as stack:
        if address.settings is not None:
            from proxy.config.sections import ListenTlsSettings  # these take a second
            from proxy.server.listener import running

            plain = address.settings.model_copy(update={"listen_tls": ListenTlsSettings()})  # only we call it
            url = (await stack.enter_async_context(running(plain))).control_url
            api_key = next((key.get_secret_value() for key in plain.control.api_keys), None)
        yield Control(str(url), api_key)


class Control(ControlApi):
    """The client's methods. A request is sent once; a failure is an OSError or a ClientError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._transport = _Transport(*_without_credentials(url.rstrip("/"), api_key))
        super().__init__(self._transport.url, self._transport, attempts=1)

    def response(self, path: str, *, timeout_s: float | None = None) -> "AbstractAsyncContextManager[Response]":
        """Yield the response to a GET request. Exports and scoring may take minutes: by default reading has no timeout.

        Raises OSError if it fails (`Refused` if the proxy returns an error).
        """
        return self._transport.response(Request("GET", path), timeout_s)

    def rows(self, path: str) -> AsyncGenerator[Any, None]:
        """Yield the rows of an export."""
        return self._rows(path)

    async def list_items(self, noun: str, limit: int, **filters: Any) -> dict[str, Any]:
        """Return {noun: up to `limit` rollouts or groups that match the filters, cursor: of the next page or None}."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.send("GET", f"/{noun}", limit=min(limit - len(found), 1000), cursor=cursor, **filters)
            found += page[noun]
            cursor = page["cursor"]
            if cursor is None or len(found) >= limit:
                return {noun: found, "cursor": cursor}

    async def texts(self, steps: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[str | None]]:
        """Return the texts of completion tokens that the recorded responses lack, by step ID and position of the choice."""
        found: dict[tuple[str, int], list[str | None]] = {}
        for step in steps:
            prompts = prompts_of(step)
            for position, choice in enumerate(step["choices"]):
                if recorded_texts(step, position) is not None:
                    continue
                texts: list[str | None] = []
                # Offsets count from the start of the prompt.
                offset = len(prompts[choice["prompt"]]) if choice["prompt"] < len(prompts) else 0
                while len(texts) < len(choice["ids"]):
                    route = path_of("rollouts", step["rollout_id"], "steps", step["step_id"], "texts")
                    query = {"choice": choice["index"], "start": offset + len(texts), "limit": MAX_TEXTS}
                    try:
                        page = await self.send("GET", route, **query)
                    except Refused:
                        return found  # an older proxy, or the rollout was deleted; the caller shows ids
                    texts += page["texts"] or [None] * len(choice["ids"])
                found[step["step_id"], position] = texts
        return found


class Response:
    """A response with its headers, while its body is received."""

    def __init__(self, url: str, received: HTTPResponse) -> None:
        self._url = url
        self._received = received
        self.status = received.status
        self.headers = received.headers

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Raises OSError if the connection is lost before its end."""
        left = self._received.length  # None if the body is chunked
        while True:
            with _failing(self._url):
                part = await asyncio.to_thread(self._received.read1, _PART_BYTES)
                if not part and left:
                    raise HTTPException(f"the connection was lost {left} bytes before the end of the response")
            if not part:
                return
            left = None if left is None else left - len(part)
            yield part

    async def read(self) -> bytes:
        """Return the body."""
        return b"".join([part async for part in self.parts()])


class _Transport(Transport):
    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._headers = headers

    async def parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with self.response(request) as response:
            async for part in response.parts():
                yield part

    @asynccontextmanager
    async def response(self, request: Request, timeout_s: float | None = None) -> AsyncIterator[Response]:
        url = f"{self.url}{request.path}{'?' if request.query else ''}{urlencode(request.query)}"
        with _failing(url):
            connection, is_over = _connection(url), Event()
        try:
            with _failing(url):
                await asyncio.to_thread(_connect, connection, timeout_s, is_over)
                response = Response(url, await asyncio.to_thread(self._send, connection, url, request))
            if response.status >= 300:
                raise Refused(url, response.status, await response.read())
            yield response
        finally:
            is_over.set()
            with suppress(OSError, AttributeError):  # it was not connected
                connection.sock.shutdown(SHUT_RDWR)  # ends a read that a thread is in
            connection.close()

    def _send(self, connection: HTTPConnection, url: str, request: Request) -> HTTPResponse:
        data = None if request.body is None else orjson.dumps(request.body)
        kind = {} if data is None else {"Content-Type": "application/json"}
        path = quote(url[url.index("/", url.index("//") + 2) :], safe=_SAFE)
        connection.request(request.method, path, data, {**request.headers, **kind, **self._headers})
        return connection.getresponse()


def _without_credentials(url: str, api_key: str | None) -> tuple[str, dict[str, str]]:
    """Return a URL without `user:password@`, and the header with these or with the key. Raises OSError for both."""
    with _failing(url):
        parts = urlsplit(url)
    credentials, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, authorization(api_key)
    if api_key:
        raise OSError("the address has user:password@, and there is an API key: a request can have only one of them")
    user, _, password = credentials.partition(":")
    basic = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {basic}"}


def _connection(url: str) -> HTTPConnection:
    """Return a connection to the host of a URL. Raises OSError unless it is one of HTTP."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise OSError("the address is not http://HOST:PORT or https://HOST:PORT")
    kind = HTTPConnection if parts.scheme == "http" else HTTPSConnection
    return kind(parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)


def _connect(connection: HTTPConnection, timeout_s: float | None, is_over: Event) -> None:
    try:
        connection.connect()
    except OSError as error:
        why = f"cannot connect to {connection.host}:{connection.port}: {failure_text(error)}"
        raise OSError(f"{why}. {unreachable_hint()}") from error
    connection.sock.settimeout(timeout_s)
    if is_over.is_set():  # the request was cancelled before there was a socket to close
        connection.close()


@contextmanager
def _failing(url: str) -> Iterator[None]:
    try:
        yield
    except (HTTPException, OSError, ValueError) as error:  # ValueError: of a port, or of the TLS context
        raise OSError(f"request to {url} failed: {failure_text(error)}") from error
