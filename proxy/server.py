"""The process that listens: applications on sockets, from start to a clean stop.

Holds the running of what `app` puts together. Rule: stopping stops accepting first, lets calls in flight end, then lets the
recorder write what it holds, and only then closes the store.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from proxy.app import make_app, make_control_app
from proxy.clock import Clock
from proxy.config import EndpointSettings, Settings, split_listen
from proxy.simulator.options import Options
from proxy.simulator.server import make_engine
from storage.store import Store

_CONTROL_DRAIN_S = 5  # the control face is asked until the last call has ended; what waits there then is told to go


@dataclass(frozen=True, slots=True)
class Served:
    """Where a running process listens; `control_url` is `url` unless the control face has a port of its own."""

    url: str
    control_url: str


@asynccontextmanager
async def running(settings: Settings, store: Store | None = None, clock: Clock | None = None) -> AsyncIterator[Served]:
    """The proxy, listening. A port of 0 takes a free one. Raises OSError, ValueError or StorageError if it cannot."""
    async with AsyncExitStack() as stack:
        app = make_app(settings, store, clock)
        control_urls: list[str] = []
        if settings.control.listen is not None:
            app.cleanup_ctx.append(_control_face(settings, settings.control.listen, control_urls))
        url = await _listen(stack, app, settings.listen, drain_s=settings.drain_s)
        yield Served(url, control_urls[0] if control_urls else url)


def _control_face(settings: Settings, listen: str, urls: list[str]) -> Callable[[web.Application], AsyncIterator[None]]:
    """The control face on its own port: there until the calls in flight have ended, so that /ready says what goes on."""

    async def control_face(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            urls.append(await _listen(stack, make_control_app(settings, app), listen, drain_s=_CONTROL_DRAIN_S))
            yield

    return control_face


@asynccontextmanager
async def simulating(listen: str, options: Options) -> AsyncIterator[str]:
    """The simulator, listening: its URL."""
    async with AsyncExitStack() as stack:
        yield await _listen(stack, make_engine(options), listen, drain_s=_CONTROL_DRAIN_S)


@asynccontextmanager
async def with_an_engine(settings: Settings) -> AsyncIterator[tuple[Settings, bool]]:
    """The settings with at least one engine: where none is configured, the simulator is started (and True given)."""
    if settings.engines.endpoints:
        yield settings, False
        return
    async with simulating("127.0.0.1:0", Options()) as url:
        endpoint = EndpointSettings(url=url, name="simulator", kind="vllm")
        engines = settings.engines.model_copy(update={"endpoints": [endpoint]})
        yield settings.model_copy(update={"engines": engines}), True


async def until_stopped() -> None:
    """Return at SIGTERM or SIGINT; a second one ends the process at once.

    By the kernel's hand, and not by an exception: Python's own answer to a second SIGINT would wait for the cleaning up.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    await stop.wait()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(name)
        signal.signal(name, signal.SIG_DFL)


async def _listen(stack: AsyncExitStack, app: web.Application, listen: str, *, drain_s: float) -> str:
    """Start an application on an address, stopped by the stack, which waits `drain_s` for its calls; its URL."""
    host, port = split_listen(listen)
    # handler_cancellation: a client that leaves cancels its call at once, also while we wait for the engine.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s)
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=4096)
    await site.start()
    bound = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{bound}"
