"""A proxy with keys for both APIs and every optional route, in front of the simulator; and raw sockets to it."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.support.fakes import settings_for
from yarl import URL

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

CONTROL, AGENT = "control-key", "agent-key"
TIMEOUT_S = 50


@dataclass(frozen=True, slots=True)
class Guarded:
    """The proxy as an outside client sees it."""

    http: aiohttp.ClientSession
    url: str

    async def call(self, method: str, path: str, key: str | None = None, *, headers=None, **named) -> SimpleNamespace:
        """Send a request, its path unchanged."""
        all_headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        async with self.http.request(
            method, URL(self.url + path, encoded=True), headers=all_headers, **named
        ) as response:
            text = await response.read()
            payload = await response.json() if response.content_type == "application/json" else None
            return SimpleNamespace(status=response.status, json=payload, text=text, headers=response.headers)

    async def raw(self, sent: bytes) -> bytes:
        """Send these bytes; return everything until the proxy closes the connection."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(sent)
            async with asyncio.timeout(TIMEOUT_S):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@pytest.fixture
async def guarded_api():
    """Makes the same of a proxy that the test started itself."""
    async with aiohttp.ClientSession() as http:
        yield lambda url: Guarded(http, url)


@pytest.fixture
def sections():
    """Settings beyond those below; a test module may override this."""
    return {}


@pytest.fixture
async def guarded(store, sections):
    """A proxy that requires keys, with two rollouts (`r1`, `r2`), a group `g2` and the routes of Atropos."""
    settings = {
        "agents": {"api_keys": [AGENT], **sections.get("agents", {})},
        "control": {"api_keys": [CONTROL]},
        "atropos": {"enabled": True},
        **{name: value for name, value in sections.items() if name != "agents"},
    }
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        aiohttp.ClientSession() as http,
        running(settings_for(engine, **settings), store) as served,
    ):
        yield Guarded(http, served.url)
