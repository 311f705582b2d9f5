"""Connections of clients: aiohttp's server, with JSON errors for requests that are not valid HTTP.

aiohttp (3.14) responds to requests that it cannot parse in plain text, with Python's representation of the bytes. It has no
public hook for that, nor for its protocol class, so three of its methods are overridden.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from aiohttp import HttpVersion10, HttpVersion11, http_exceptions, web

from proxy.api.failures import internal_error
from proxy.errors import BadRequest, ExpectationFailed, ProxyError
from proxy.protocols.dialects.base import openai_error
from proxy.telemetry.logs import WIRE_LOG

# By class; the first match applies. The status of each is 400 in aiohttp.
_REASONS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (http_exceptions.LineTooLong, "The request line or a header is too long."),
    (http_exceptions.InvalidHeader, "Invalid header."),
    (http_exceptions.InvalidURLError, "Invalid path."),
    (http_exceptions.BadHttpMethod, "Invalid method."),
    (
        http_exceptions.PayloadEncodingError,
        "The request body does not match its Content-Length or Transfer-Encoding header.",
    ),
    (http_exceptions.HttpProcessingError, "The request is not valid HTTP/1.1."),
)


class Runner(web.AppRunner):
    """Run an application; aiohttp's `RequestHandler` gets the `options`.

    `on_connection_lost` is called for each connection that closes. Calls on connections above `max_connections` are refused.
    """

    on_connection_lost: Callable[[], None] | None = None

    def __init__(
        self, app: web.Application, *, shutdown_timeout: float, max_connections: int | None = None, **options: Any
    ) -> None:
        # handler_cancellation: a disconnect cancels the call at once, also while it waits for the engine.
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout, **options)
        self.max_connections = max_connections
        self.options = options

    @property
    def open_connections(self) -> int:
        """The number of open connections."""
        return 0 if self.server is None else len(self.server._connections)  # noqa: SLF001 - `connections` copies them

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self)


class _Server(web.Server):
    """An application's server with `_Connection` as its protocol."""

    def __init__(self, server: web.Server, runner: Runner) -> None:
        super().__init__(
            _with_known_versions(server.request_handler),
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self._runner = runner

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._runner.options)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count a connection."""
        super().connection_made(handler, transport)
        most = self._runner.max_connections
        if most is not None and len(self._connections) > most and isinstance(handler, _Connection):
            handler.surplus = most

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        super().connection_lost(handler, exc)
        if self._runner.on_connection_lost is not None:
            self._runner.on_connection_lost()


_VERSIONS: Final = (HttpVersion10, HttpVersion11)
_Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _with_known_versions(handle: _Handler) -> _Handler:
    """Refuse versions of HTTP other than 1.0 and 1.1, which aiohttp (3.14) answers, and an unknown `Expect` header, which it
    refuses in plain text before any middleware.
    """

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        if request.version not in _VERSIONS:
            refusal = _refusal(BadRequest("Unsupported version of HTTP; use HTTP/1.1."))
            refusal.force_close()
            return refusal
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            return _refusal(ExpectationFailed("Unsupported Expect header; only 100-continue is supported."))
        answer = await handle(request)
        if isinstance(request.protocol, _Connection) and request.protocol.surplus:
            answer.force_close()
        return answer

    return handled


class _Connection(web.RequestHandler):
    """One connection. `surplus`: the limit of connections, if there were more when it was made; else 0."""

    __slots__ = ("surplus",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.surplus = 0

    def close(self) -> None:
        """Stop reading requests.

        aiohttp (3.14) drops data that arrives after this. A new connection begins to wait for a request only
        now, and its client would wait until the idle timeout.
        """
        super().close()
        asyncio.get_running_loop().call_soon(self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        if self._waiter is not None:  # no request is being answered
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response if aiohttp could not parse the request, or if its handler failed outside our middleware."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response was sent already; the connection is closed")
        answer = _answer(exc)
        answer.force_close()
        return answer


def _answer(failure: BaseException | None) -> web.Response:
    error: ProxyError
    reason = next((reason for kind, reason in _REASONS if isinstance(failure, kind)), None)
    if reason is not None:
        WIRE_LOG.info("Malformed request: %s", reason)
        error = BadRequest(reason)
    else:
        error = internal_error(failure or TimeoutError())
    return _refusal(error)


def _refusal(error: ProxyError) -> web.Response:
    return web.Response(status=error.status, body=openai_error(error), content_type="application/json")
