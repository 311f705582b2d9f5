"""A process that starts without a store listens with a standby application, and continues once the store is reachable."""

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import pytest
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.stored import stored_steps

from proxy.server.listener import running
from storage import open_store
from storage.embedded.server import start_embedded
from storage.errors import StorageError

CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def addresses():
    """Two free ports, on which the standby application and then the proxy listen."""
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]


@asynccontextmanager
async def starting(settings, store=None):
    """A starting process, which runs until the end of the context."""
    over = asyncio.Event()

    async def run() -> None:
        async with running(settings, store):
            await over.wait()

    task = asyncio.ensure_future(run())
    try:
        yield task
    finally:
        over.set()
        await asyncio.wait([task], timeout=50)


async def wait_for_status(http, url: str, status: int) -> dict:
    """Return the first response with this status."""
    async with asyncio.timeout(50):
        while True:
            try:
                async with http.get(url) as response:
                    if response.status == status:
                        return await response.json()
            except aiohttp.ClientConnectorError:
                pass
            await asyncio.sleep(0.01)


async def test_a_start_without_a_store_is_alive_and_not_ready_and_calls_are_503(store, engine, http, addresses):
    """This includes the control API's own port; /ready has the reason, and no engine gets a request."""
    store.failing.add("set_once")
    model, control = (f"http://{address}" for address in addresses)
    engine.plays(load("chat_ids_lp"))
    settings = settings_for(engine.url, listen=addresses[0], control={"listen": addresses[1]})
    async with starting(settings, store):
        alive = await wait_for_status(http, control + "/health", 200)
        ready = await wait_for_status(http, control + "/ready", 503)
        assert {"status": "ok"} == await wait_for_status(http, control + "/healthz", 200)
        assert ready == await wait_for_status(http, control + "/readyz", 503)
        async with http.post(model + CHAT, json=BODY) as refused:
            error = await refused.json()
        requests_before = len(engine.requests)
        store.failing.clear()
        await wait_for_status(http, control + "/ready", 200)
        async with http.post(model + CHAT, json=BODY) as made:
            pass

    assert ("ok", "the test took the store away", 0) == (alive["status"], ready["store"], requests_before)
    assert (503, "store_unavailable", "1", 200) == (
        refused.status,
        error["error"]["type"],
        refused.headers["Retry-After"],
        made.status,
    )
    assert 1 == len(await stored_steps(store, "r1"))


async def test_a_store_that_becomes_reachable_later_is_used(engine, http, addresses, tmp_path):
    """No server listens at its URL when the process starts."""
    engine.plays(load("chat_ids_lp"))
    url = f"unix:{tmp_path / 'later' / 'valkey.sock'}"
    async with starting(settings_for(engine.url, listen=addresses[0], store={"url": url})):
        ready = await wait_for_status(http, f"http://{addresses[0]}/ready", 503)
        server = await start_embedded(tmp_path / "later", "acknowledged")
        await wait_for_status(http, f"http://{addresses[0]}/ready", 200)
        async with http.post(f"http://{addresses[0]}{CHAT}", json=BODY) as made:
            pass
        opened = await open_store(url)
        steps = await stored_steps(opened, "r1")
        await opened.close()
    await server.stop()

    assert "cannot be reached" in ready["store"]
    assert (200, 1) == (made.status, len(steps))


async def test_a_store_that_becomes_reachable_and_is_unusable_ends_the_start(
    store, engine, http, addresses, monkeypatch
):
    """The error has the reason."""

    async def unfit(*args):
        raise StorageError("it is too old")

    store.failing.add("set_once")
    async with starting(settings_for(engine.url, listen=addresses[0]), store) as task:
        await wait_for_status(http, f"http://{addresses[0]}/ready", 503)
        monkeypatch.setattr(store._store, "set_once", unfit)
        store.failing.clear()
        with pytest.raises(StorageError, match="too old"):
            await task
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"http://{addresses[0]}/health")
