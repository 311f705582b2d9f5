"""An engine on a real socket that changes the responses of another one."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tests.support.listening import listening

# Path, request and JSON response -> the response, which may be changed in place; another HTTP response in its place; or None:
# the connection is closed.
Change = Callable[[str, dict[str, Any], Any], Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def tampered(
    engine: str, change: Change, routes: Mapping[str, Handler] | None = None, *, is_streaming: bool = False
) -> AsyncIterator[str]:
    """Yield the URL of a server that forwards every request to the engine, and changes JSON responses and events.

    `routes` are answered by the server itself. With `is_streaming`, events are forwarded at once, unchanged.
    """

    async def forward(request: web.Request) -> web.StreamResponse:
        text = await request.read()
        body = orjson.loads(text) if text else {}
        if routes and request.path in routes:
            return await routes[request.path](request)
        async with aiohttp.ClientSession() as http:
            url, headers = engine + request.path_qs, {"Content-Type": "application/json"}
            headers |= {name: value for name, value in request.headers.items() if name.startswith("x-sglext")}
            async with http.request(request.method, url, data=text or None, headers=headers) as response:
                if is_streaming and response.content_type == "text/event-stream":
                    return await _passed_on(request, response)
                received = await response.read()
        if response.content_type == "text/event-stream":
            lines = [_changed_line(line, request.path, body, change) for line in received.split(b"\n")]
            return web.Response(body=b"\n".join(lines), content_type=response.content_type)
        if response.status != 200 or response.content_type != "application/json":
            return web.Response(status=response.status, body=received, content_type=response.content_type)
        answer = change(request.path, body, orjson.loads(received))
        if answer is None and request.transport is not None:
            request.transport.close()
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async with listening(forward) as url:
        yield url


async def _passed_on(request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    async for read in response.content.iter_any():
        await answer.write(read)
    return answer


def _changed_line(line: bytes, path: str, body: dict[str, Any], change: Change) -> bytes:
    if not line.startswith(b"data: {"):
        return line
    return b"data: " + orjson.dumps(change(path, body, orjson.loads(line.removeprefix(b"data: "))))
