"""Signals during the start, and the garbage that calls leave."""

import asyncio
import gc
import signal
import socket
import subprocess

import aiohttp
import pytest
from tests.support.commands import TOKENTAPE, children_of, is_alive
from tests.support.fakes import FailingStore, proxying
from tests.support.recorded import load
from tests.support.stored import wait_for_steps

from proxy.api.model.call import Call

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
CHAT = "/rollouts/r1/v1/chat/completions"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_while_waiting_for_the_store_exits_with_0(workers):
    """No process remains."""
    with socket.socket() as taken:  # no server listens there
        taken.bind(("127.0.0.1", 0))
        store = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        words = ["serve", "--listen", "127.0.0.1:0", "--store", store, "--workers", workers]
        process = subprocess.Popen([*TOKENTAPE, *words], stderr=subprocess.PIPE, text=True)
        with process.stderr:
            output = process.stderr.readline()
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            code = process.wait(50)

    assert "Store unreachable" in output
    assert code == 0
    assert not any(map(is_alive, children))


async def answered(store, engine, http):
    engine.plays(STREAM)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json={}) as response:
        await response.read()


async def of_an_unreachable_engine(store, engine, http):
    async with proxying("http://127.0.0.1:9", store) as served:
        for _ in range(6):  # with the endpoint ejected as well
            async with http.post(served.url + CHAT, json={}) as response:
                assert response.status == 503


async def of_an_engine_that_disconnects(store, engine, http):
    engine.streams([STREAM.response[:400]], then="die")
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json={}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def not_stored(store, engine, http):
    engine.plays(WHOLE)
    failing_store = FailingStore(store)
    async with proxying(engine.url, failing_store) as served:
        failing_store.failing.add("append")
        async with http.post(served.url + CHAT, json={}) as response:
            assert response.status == 503


async def of_a_client_that_disconnects(store, engine, http):
    engine.hangs()
    async with proxying(engine.url, store) as served:
        calling = asyncio.ensure_future(http.post(served.url + CHAT, json={}))
        await engine.reached.wait()
        calling.cancel()
        await asyncio.wait([calling])
        await wait_for_steps(store, "r1")


async def rejected(store, engine, http):
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, data=b"[]") as response:
        assert response.status == 400


@pytest.mark.parametrize(
    "call",
    [
        answered,
        of_an_unreachable_engine,
        of_an_engine_that_disconnects,
        not_stored,
        of_a_client_that_disconnects,
        rejected,
    ],
)
async def test_no_call_is_kept_until_the_next_garbage_collection(store, engine, http, call):
    """Collections are rare, so that reference counts have to free the bodies of calls."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await call(store, engine, http)
        gc.collect()
        kept = [garbage for garbage in gc.garbage if isinstance(garbage, Call)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert kept == []
