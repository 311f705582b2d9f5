"""A server on a free port."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(app: web.Application | Handler, certificate: tuple[Path, Path] | None = None) -> AsyncIterator[str]:
    """Serve an application, or every request by one handler; yield the URL. `certificate`: and its key, for TLS."""
    if not isinstance(app, web.Application):
        handler, app = app, web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", handler)
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
