"""The baseline: a minimal aiohttp reverse proxy that forwards bytes and parses and stores nothing."""

from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

ENGINE = web.AppKey("engine", str)
SESSION = web.AppKey("session", aiohttp.ClientSession)


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Forward one call."""
    body = await request.read()
    url = request.app[ENGINE] + request.path
    async with request.app[SESSION].post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await response.prepare(request)
        async for read in answer.content.iter_any():
            await response.write(read)
        await response.write_eof()
        return response


async def session_of(app: web.Application) -> AsyncIterator[None]:
    """Provide one client session without limits."""
    connector = aiohttp.TCPConnector(limit=0)
    app[SESSION] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    yield
    await app[SESSION].close()


def make_bare(engine: str) -> web.Application:
    """Return the application."""
    app = web.Application(client_max_size=2**26)
    app[ENGINE] = engine
    app.cleanup_ctx.append(session_of)
    app.router.add_route("POST", "/{path:.*}", pass_on)
    return app
