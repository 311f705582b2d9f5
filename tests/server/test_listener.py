"""Listening, the shutdown, and a start without a store."""

import asyncio
import resource
import socket
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import aiohttp
import pytest
from tests.support.fakes import fake_engine, settings_for
from tests.support.recorded import load
from tests.support.stored import stored_steps

from proxy.server.handover import backlog_of
from proxy.server.listener import listen_at, running
from storage import open_store
from storage.embedded.server import start_embedded
from storage.errors import StorageError

STREAM = load("chat_ids_lp_stream")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def test_with_separate_ports_each_api_is_served_on_its_port_only(store):
    async with fake_engine() as engine:
        settings = settings_for(engine.url, control={"listen": "127.0.0.1:0"})
        async with running(settings, store) as served, aiohttp.ClientSession() as http:
            async with http.get(served.control_url + "/rollouts") as control:
                pass
            async with http.get(served.url + "/rollouts") as model:
                pass
            async with http.post(served.control_url + "/v1/chat/completions", json={}) as model_call_on_control:
                pass

    assert [control.status, model.status, model_call_on_control.status] == [200, 404, 404]


async def test_a_port_in_use_is_an_error_with_the_port(store):
    async with fake_engine() as engine:
        port = engine.url.rpartition(":")[2]
        with pytest.raises(OSError, match=port):
            async with running(settings_for(engine.url, listen=f"127.0.0.1:{port}"), store):
                pass


async def test_the_shutdown_refuses_new_connections_and_completes_calls_in_flight(store):
    """The control API reports it until the last call has ended; its step is stored."""
    async with fake_engine() as engine, aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        hold = asyncio.Event()
        engine.streams([STREAM.response], then="end", after=hold)
        settings = settings_for(engine.url, control={"listen": "127.0.0.1:0"})
        served = await stack.enter_async_context(running(settings, store))
        call = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await engine.reached.wait()
        stopping = asyncio.ensure_future(stack.aclose())
        while (ready := await http.get(served.control_url + "/ready")).status == 200:
            pass
        payload = await ready.json()
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(served.url + "/health")
        hold.set()
        response = await call
        body = await response.read()
        await stopping

    assert (ready.status, payload) == (503, {"status": "stopping", "in_flight": 1})
    assert body.endswith(b"data: [DONE]\n\n")
    assert len(await stored_steps(store, "r1")) == 1


async def test_during_shutdown_delay_s_the_proxy_is_not_ready_and_accepts_calls(store, monkeypatch):
    """Load balancers remove it meanwhile; then its port is closed."""
    delays, over, sleep = [], asyncio.Event(), asyncio.sleep

    async def until_over(seconds):
        if seconds == 1234:
            delays.append(seconds)
            await over.wait()
        else:
            await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", until_over)
    async with fake_engine() as engine, aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        engine.plays(STREAM)
        served = await stack.enter_async_context(running(settings_for(engine.url, shutdown_delay_s=1234), store))
        stopping = asyncio.ensure_future(stack.aclose())
        while (ready := await http.get(served.url + "/ready")).status == 200:
            pass
        payload = await ready.json()
        response = await http.post(served.url + CHAT, json=BODY)
        body = await response.read()
        assert not stopping.done()
        over.set()
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(served.url + "/ready")

    assert delays == [1234]
    assert payload["status"] == "stopping"
    assert body.endswith(b"data: [DONE]\n\n")
    assert len(await stored_steps(store, "r1")) == 1


async def test_a_call_that_exceeds_drain_timeout_s_is_aborted_and_recorded_as_partial(store):
    async with fake_engine() as engine, aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        engine.streams([STREAM.response[:2000]], then="hang")
        served = await stack.enter_async_context(running(settings_for(engine.url, drain_timeout_s=0.05), store))
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readany()
        await stack.aclose()
        with pytest.raises(aiohttp.ClientError):
            await response.read()

    assert [step.status for step in await stored_steps(store, "r1")] == ["partial"]


CALL = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


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
        assert await wait_for_status(http, control + "/healthz", 200) == {"status": "ok"}
        assert ready == await wait_for_status(http, control + "/readyz", 503)
        async with http.post(model + CHAT, json=CALL) as refused:
            error = await refused.json()
        requests_before = len(engine.requests)
        store.failing.clear()
        await wait_for_status(http, control + "/ready", 200)
        async with http.post(model + CHAT, json=CALL) as made:
            pass

    assert (alive["status"], ready["store"], requests_before) == ("ok", "the test took the store away", 0)
    assert (
        refused.status,
        error["error"]["type"],
        refused.headers["Retry-After"],
        made.status,
    ) == (503, "store_unavailable", "1", 200)
    assert len(await stored_steps(store, "r1")) == 1


async def test_a_store_that_becomes_reachable_later_is_used(engine, http, addresses, tmp_path):
    """No server listens at its URL when the process starts."""
    engine.plays(load("chat_ids_lp"))
    url = f"unix:{tmp_path / 'later' / 'valkey.sock'}"
    async with starting(settings_for(engine.url, listen=addresses[0], store={"url": url})):
        ready = await wait_for_status(http, f"http://{addresses[0]}/ready", 503)
        server = await start_embedded(tmp_path / "later", "acknowledged")
        await wait_for_status(http, f"http://{addresses[0]}/ready", 200)
        async with http.post(f"http://{addresses[0]}{CHAT}", json=CALL) as made:
            pass
        opened = await open_store(url)
        steps = await stored_steps(opened, "r1")
        await opened.close()
    await server.stop()

    assert "cannot be reached" in ready["store"]
    assert (made.status, len(steps)) == (200, 1)


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


async def test_connections_that_wait_in_the_backlog_are_counted():
    (listening,) = listen_at("127.0.0.1:0")
    with listening, ExitStack() as stack:
        before = backlog_of([listening])
        for _ in range(3):
            stack.enter_context(socket.create_connection(listening.getsockname()))

        assert (before, backlog_of([listening])) == (0, 3)


async def test_a_process_may_open_as_many_files_as_its_hard_limit_allows(store):
    """With the usual soft limit of 1,024, connections would wait in the backlog at 500 calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        async with running(settings_for(None), store):
            raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert raised == (hard, hard)
