"""Listening, and the shutdown."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest
from tests.support.fakes import fake_engine, settings_for
from tests.support.recorded import load
from tests.support.stored import stored_steps

from proxy.server.listener import running

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

    assert [200, 404, 404] == [control.status, model.status, model_call_on_control.status]


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

    assert (503, {"status": "stopping", "in_flight": 1}) == (ready.status, payload)
    assert body.endswith(b"data: [DONE]\n\n")
    assert 1 == len(await stored_steps(store, "r1"))


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

    assert [1234] == delays
    assert "stopping" == payload["status"]
    assert body.endswith(b"data: [DONE]\n\n")
    assert 1 == len(await stored_steps(store, "r1"))


async def test_a_call_that_exceeds_drain_timeout_s_is_aborted_and_recorded_as_partial(store):
    async with fake_engine() as engine, aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        engine.streams([STREAM.response[:2000]], then="hang")
        served = await stack.enter_async_context(running(settings_for(engine.url, drain_timeout_s=0.05), store))
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readany()
        await stack.aclose()
        with pytest.raises(aiohttp.ClientError):
            await response.read()

    assert ["partial"] == [step.status for step in await stored_steps(store, "r1")]
