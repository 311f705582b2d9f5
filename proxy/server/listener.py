"""The listening sockets of the applications, from start to graceful shutdown.

A shutdown first announces itself on /ready (`shutdown_delay_s`), then stops accepting connections, waits for calls in flight
(`drain_timeout_s`), then for the recorder's pending writes, and closes the store last.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.failures import answer_failures
from proxy.clock import Clock
from proxy.config.addresses import split_listen
from proxy.config.engines import EndpointSettings
from proxy.config.sections import ListenTlsSettings, StoreSettings
from proxy.config.settings import Settings
from proxy.errors import StoreUnavailable, failure_text
from proxy.server.app import make_app, make_control_app
from proxy.server.connections import Runner
from proxy.server.handover import HandedOver, backlog_of
from proxy.simulator.options import Options
from proxy.telemetry.logs import LOG, WIRE_LOG
from proxy.telemetry.multiprocess import WorkerSlot
from storage import open_store
from storage.errors import StoreUnreachable
from storage.redis.store import Store

_CONTROL_DRAIN_TIMEOUT_S = (
    5  # the control API listens until the last call has ended; requests that wait there then are aborted
)
_BACKLOG = 4096  # the kernel's own limit (net.core.somaxconn) is the same by default
_STANDBY_INTERVAL_S = 0.5
_PROBE = "probe"  # a constant of the store: only the first write of it changes the store
_LINGER_TIMEOUT_S = 2  # how long the rest of a refused body is read, so that its sender receives the error


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The URLs of a running process; `control_url` is `url` unless the control API has its own port."""

    url: str
    control_url: str


@asynccontextmanager
async def running(
    settings: Settings,
    store: Store | None = None,
    clock: Clock | None = None,
    slot: WorkerSlot | None = None,
    channels: Sequence[socket.socket] = (),
) -> AsyncIterator[RunningServer]:
    """Run the proxy and listen; port 0 selects a free port. Raises OSError, ValueError or StorageError on failure.

    While the store is unreachable, a standby application listens. With a `slot`, this is one of several workers: its supervisor
    listens at the addresses, and hands connections over by `channels` (see `handover`), the one of `control.listen` last.
    """
    _allow_many_files()
    async with AsyncExitStack() as stack:
        served: RunningServer | None = None
        while served is None:
            try:
                served = await stack.enter_async_context(_started(settings, store, clock, slot, channels))
            except StoreUnreachable as error:
                await _stand_by(settings, store, _StandbyApp(str(error)), channels)
        yield served


def _allow_many_files() -> None:
    """Raise the limit of open files as far as this process may, since each call has two: most systems begin with 1,024."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit; macOS refuses an infinite one
        import resource  # noqa: PLC0415

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@asynccontextmanager
async def _started(
    settings: Settings,
    store: Store | None,
    clock: Clock | None,
    slot: WorkerSlot | None,
    channels: Sequence[socket.socket],
) -> AsyncIterator[RunningServer]:
    channel, control_channel = _channels(channels)
    async with AsyncExitStack() as stack:
        app = make_app(settings, store, clock, slot)
        control_urls: list[str] = []
        if settings.control.listen is not None:
            app.cleanup_ctx.append(_control_api(settings, settings.control.listen, control_urls, control_channel))
        most, drain_s = settings.agents.max_connections, settings.drain_timeout_s
        url = await _listen(
            stack, app, settings.listen, settings, channel, drain_timeout_s=drain_s, max_connections=most
        )
        yield RunningServer(url, control_urls[0] if control_urls else url)
        if settings.shutdown_delay_s:
            app[CONTEXT].stopping.set()
            await asyncio.sleep(settings.shutdown_delay_s)


class _StandbyApp:
    """The application that listens while a starting process has no store: alive, not ready; calls are refused with `reason`.

    The proxy itself is made once the store is reachable; a store that is reachable and unusable ends the start with an error.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def make_app(self) -> web.Application:
        """Return the application for one port."""
        app = web.Application(middlewares=[answer_failures])
        for suffix in ("", "z"):
            app.router.add_get(f"/health{suffix}", self._show_health)
            app.router.add_get(f"/ready{suffix}", self._show_ready)
        app.router.add_route("*", r"/{path:[\s\S]*}", self._refuse)
        return app

    async def wait_for_store(self, settings: StoreSettings, store: Store | None) -> None:
        """Return once a write to the store succeeds. Raises StorageError if it is reachable and unusable."""
        LOG.error("Store unreachable; calls are rejected until it is reachable: %s", self.reason)
        while True:
            await asyncio.sleep(_STANDBY_INTERVAL_S)
            try:
                await _try_write(settings, store)
            except StoreUnreachable as error:
                self.reason = str(error)
            else:
                LOG.info("Store reachable")
                return

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _show_ready(self, _request: web.Request) -> web.Response:
        body = {"status": "not ready", "store": self.reason, "engines": {}}
        return web.json_response(body, status=503, headers={"Retry-After": "1"})

    async def _refuse(self, _request: web.Request) -> web.StreamResponse:
        raise StoreUnavailable(f"The store has been unreachable since this process started: {self.reason}")


async def _try_write(settings: StoreSettings, store: Store | None) -> None:
    opened = store or await open_store(settings.url, settings.options())
    try:
        await opened.set_once(_PROBE, b"1")
    finally:
        if store is None:
            await opened.close()


async def _stand_by(
    settings: Settings, store: Store | None, standby: _StandbyApp, channels: Sequence[socket.socket]
) -> None:
    """Listen with the standby application until the store is reachable."""
    async with AsyncExitStack() as stack:
        listens = (settings.listen, settings.control.listen)
        for listen, channel in zip(listens, _channels(channels), strict=True):
            if listen is not None:
                await _listen(stack, standby.make_app(), listen, settings, channel)
        await standby.wait_for_store(settings.store, store)


def _channels(channels: Sequence[socket.socket]) -> tuple[socket.socket | None, socket.socket | None]:
    """Return the channels of both addresses; None for an address at which this process listens itself."""
    return (channels[0] if channels else None), (channels[1] if len(channels) > 1 else None)


def _control_api(
    settings: Settings, listen: str, urls: list[str], channel: socket.socket | None
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return the lifespan of the control API on its own port; it listens until the calls in flight have ended."""

    async def control_api(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            urls.append(await _listen(stack, make_control_app(settings, app), listen, settings, channel))
            yield

    return control_api


@asynccontextmanager
async def simulating(listen: str, options: Options) -> AsyncIterator[str]:
    """Run the simulator and listen; yield its URL."""
    from proxy.simulator.server import make_engine  # noqa: PLC0415 - a proxy before an engine needs none of it

    async with AsyncExitStack() as stack:
        yield await _listen(stack, make_engine(options), listen)


@asynccontextmanager
async def with_an_engine(settings: Settings) -> AsyncIterator[tuple[Settings, bool]]:
    """Yield settings with at least one engine, and whether the simulator was started because none is configured."""
    if settings.engines.endpoints:
        yield settings, False
        return
    async with simulating("127.0.0.1:0", Options()) as url:
        endpoint = EndpointSettings(url=url, name="simulator", kind="vllm")
        engines = settings.engines.model_copy(update={"endpoints": [endpoint]})
        yield settings.model_copy(update={"engines": engines}), True


def _tls(settings: ListenTlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context, if configured. Raises ValueError for an invalid certificate or key."""
    if settings.cert_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(
            settings.cert_file, settings.key_file, password=""
        )  # empty, to prevent a prompt in the terminal
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(
            f"listen_tls: invalid certificate {settings.cert_file} or key {settings.key_file}: {failure_text(error)}"
        ) from error
    return context


async def _listen(
    stack: AsyncExitStack,
    app: web.Application,
    listen: str,
    settings: Settings | None = None,
    channel: socket.socket | None = None,
    *,
    drain_timeout_s: float = _CONTROL_DRAIN_TIMEOUT_S,
    max_connections: int | None = None,
) -> str:
    """Start an application on an address and return its URL; the stack stops it, with `drain_timeout_s` for its calls.

    With a `channel`, the supervisor listens there and hands connections over. With `max_connections`, they are metrics.
    """
    host, port = split_listen(listen)
    tls = _tls(settings.listen_tls) if settings else None
    # keepalive_timeout: aiohttp (3.14) applies it to the head of the first request as well.
    # auto_decompress: `body` decompresses bodies, within its limits.
    runner = Runner(
        app,
        access_log=None,
        logger=WIRE_LOG,
        shutdown_timeout=drain_timeout_s,
        max_connections=max_connections,
        keepalive_timeout=settings.agents.idle_timeout_s if settings else 75,
        lingering_time=_LINGER_TIMEOUT_S,
        auto_decompress=False,
    )
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    waiting: Callable[[], int]
    if channel is not None:
        handed_over = HandedOver(runner, channel, listen, tls)
        await handed_over.start()
        bound, waiting = port, lambda: handed_over.waiting
    else:
        opened = listen_at(listen)
        for one in opened:
            await web.SockSite(runner, one, ssl_context=tls).start()
        bound, waiting = opened[0].getsockname()[1], partial(backlog_of, opened)
    if max_connections is not None:
        metrics = app[CONTEXT].metrics
        metrics.connections.set_function(lambda: runner.open_connections)
        metrics.connections_limit.set(max_connections)
        metrics.waiting_connections.set_function(waiting)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{bound}"


def listen_at(listen: str) -> list[socket.socket]:
    """Return listening sockets for the addresses of a host, all with one port. Raises OSError."""
    host, port = split_listen(listen)
    opened: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            opened.append(socket.socket(family, kind, protocol))
            opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened[-1].settimeout(0)
            opened[-1].bind((address[0], port, *address[2:]))
            opened[-1].listen(_BACKLOG)
            port = opened[-1].getsockname()[1]
    except OSError as error:
        for each in opened:
            each.close()
        raise OSError(f"Cannot listen on {listen}: {failure_text(error)}") from error
    return opened
