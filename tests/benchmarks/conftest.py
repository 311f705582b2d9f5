"""TokenTape in front of the engine of the benchmarks."""

import aiohttp
import pytest
from tests.support.session import engine_options, proxy, sections  # noqa: F401 - fixtures

from benchmarks.turns import TurnsEngine
from benchmarks.upstream import listen
from proxy.config.settings import load
from proxy.server.listener import running


@pytest.fixture
async def proxied(tmp_path):
    """The URL of TokenTape, which continues calls in `append`, and a client session."""
    server, port = await listen(TurnsEngine)
    settings = load(
        listen="127.0.0.1:0",
        engines={"endpoints": [{"url": f"http://127.0.0.1:{port}"}]},
        store={"url": f"embedded:{tmp_path / 'store'}"},
        continuation={"mode": "append"},
    )
    TurnsEngine.counts.clear()
    async with running(settings) as served, aiohttp.ClientSession() as http:
        yield served.url, http
    server.close()
