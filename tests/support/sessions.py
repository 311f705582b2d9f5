"""A proxy that serves the routes of Atropos' proxy, and a plain HTTP client."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import aiohttp
import orjson
from tests.support.fakes import settings_for

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

HELLO = [{"role": "user", "content": "Hello!"}]


@asynccontextmanager
async def serving_sessions(store, engine_url=None, *, shape="vllm", **sections) -> AsyncIterator[SimpleNamespace]:
    """Yield `url`, `engine_url`, `request(method, path, body=None, headers=None)` (status, JSON) and `create(**terms)`
    (UUID).
    """
    async with AsyncExitStack() as stack:
        if engine_url is None:
            engine_url = await stack.enter_async_context(simulating("127.0.0.1:0", Options(shape=shape)))
        settings = settings_for(engine_url, **{"atropos": {"enabled": True}, **sections})
        served = await stack.enter_async_context(running(settings, store))
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def request(method, path, body=None, headers=None, url=served.url):
            async with http.request(method, url + path, json=body, headers=headers) as response:
                text = await response.read()
                return response.status, orjson.loads(text) if text[:1] in b"{[" else text

        async def create(**terms):
            status, body = await request("POST", "/sessions/create", terms)
            assert status == 200, body
            return body["uuid"]

        yield SimpleNamespace(
            url=served.url, control_url=served.control_url, engine_url=engine_url, request=request, create=create
        )


def error(status, message):
    """Return the error body of Atropos' proxy."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "code": status}}
