"""The policy version, announced and stamped."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from fakes import settings_for
from recorded import load

from proxy.server.listener import running


async def stamp(proxy, rollout):
    (step, *_) = (await proxy.get(f"/rollouts/{rollout}/steps")).json["steps"]
    return SimpleNamespace(
        start=step["policy_version"],
        end=step["policy_version_end"],
        spans=[s["policy_version"] for s in step["choices"][0]["spans"]],
    )


async def test_calls_after_an_announcement_are_stamped_with_it(proxy):
    """Those before it are not; the version is a word, and a number is its digits."""
    assert {"version": None} == (await proxy.get("/policy")).json
    for number, version in enumerate((None, 12, "main")):
        if version is not None:
            assert {"version": str(version)} == (await proxy.put("/policy", {"version": version})).json
        await proxy.chat(f"r{number}")
    stamps = [await stamp(proxy, f"r{number}") for number in range(3)]

    assert [None, "12", "main"] == [one.start for one in stamps]
    assert [[None], ["12"], ["main"]] == [one.spans for one in stamps]
    assert {"version": "main"} == (await proxy.get("/policy")).json


async def test_every_process_that_shares_the_store_stamps_what_was_announced(proxy, store):
    """From the answer on, whoever was asked."""
    async with running(settings_for(None), store) as other:
        for version in range(5):
            async with proxy.http.put(f"{other.url}/policy", json={"version": version}) as response:
                assert 200 == response.status
            await proxy.chat(f"r{version}")
            assert str(version) == (await stamp(proxy, f"r{version}")).start


@pytest.mark.parametrize("body", [{}, {"version": None}, {"version": ""}, {"version": 1.5}, {"version": "x" * 257}])
async def test_what_is_no_version_is_refused(proxy, body):
    """422, and what was announced stays."""
    await proxy.put("/policy", {"version": 1})

    assert 422 == (await proxy.put("/policy", body)).status
    assert {"version": "1"} == (await proxy.get("/policy")).json


@pytest.fixture
async def held(engine):
    """Lets an engine's first answer go; it answers all others at once."""
    letting_go = asyncio.Event()

    async def respond(request, body):
        if len(engine.requests) == 1:
            await letting_go.wait()
        return web.Response(body=load("chat_ids_lp").response, content_type="application/json")

    engine.respond = respond
    return letting_go


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_a_version_announced_while_a_call_is_in_flight_is_its_end(store, http, engine, held, elsewhere):
    """The step says with which it began and with which it ended, as soon as this process was told of it."""
    async with running(settings_for(engine.url), store) as served, running(settings_for(None), store) as other:

        async def call(rollout):
            url = f"{served.url}/rollouts/{rollout}/v1/chat/completions"
            async with http.post(url, json={"messages": [{"role": "user", "content": "hi"}]}) as response:
                return await response.read()

        async def announce(version):
            async with http.put(
                f"{(other if elsewhere else served).url}/policy", json={"version": version}
            ) as response:
                assert 200 == response.status

        await announce(1)
        first = asyncio.ensure_future(call("r1"))
        await engine.reached.wait()
        await announce(2)
        await call("r2")
        held.set()
        await first
        seen = []
        for rollout in ("r1", "r2"):
            async with http.get(f"{served.url}/rollouts/{rollout}/steps") as response:
                (step,) = (await response.json())["steps"]
                seen.append((step["policy_version"], step["policy_version_end"]))

    assert [("1", "2"), ("2", None)] == seen


async def test_calls_of_a_pause_wait_and_go_on_with_the_new_version(proxy, store):
    """Whichever process they come to; when it is over they are stamped with what was announced meanwhile."""
    async with running(settings_for(None), store) as other:
        async with proxy.http.post(f"{other.url}/policy/pause", json={"mode": "wait"}) as response:
            assert {"mode": "wait", "in_flight": 0, "drained": True} == await response.json()
        call = asyncio.create_task(proxy.chat("r1"))
        done, _ = await asyncio.wait([call], timeout=0.3)
        assert not done
        await proxy.put("/policy", {"version": 2})
        async with proxy.http.post(f"{other.url}/policy/resume") as response:
            assert {"mode": None, "in_flight": 0} == await response.json()
        await call

    assert "2" == (await stamp(proxy, "r1")).start


async def test_calls_of_a_rejecting_pause_are_told_when_to_come_again(proxy):
    """429 with Retry-After and nothing recorded; once it is resumed they are answered."""
    await proxy.post("/policy/pause", {"mode": "reject"})
    refused = await proxy.post("/rollouts/r1/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    await proxy.post("/policy/resume")
    await proxy.chat("r1")

    assert (429, "paused", "1") == (refused.status, refused.json["error"]["code"], refused.headers["Retry-After"])
    assert 1 == len((await proxy.get("/rollouts/r1/steps")).json["steps"])


async def test_a_drain_ends_when_the_last_call_of_any_process_does(store, http, engine, held):
    """Not before; without `drain_s` the number in flight is told at once."""
    async with running(settings_for(engine.url), store) as served, running(settings_for(None), store) as other:

        async def ask(url, **named):
            async with http.post(url, **named) as response:
                return await response.json()

        body = {"messages": [{"role": "user", "content": "hi"}]}
        call = asyncio.create_task(ask(f"{served.url}/rollouts/r1/v1/chat/completions", json=body))
        async with asyncio.timeout(50):
            while not engine.requests:
                await asyncio.sleep(0.01)
        told = await ask(f"{other.url}/policy/pause")
        drain = asyncio.create_task(ask(f"{other.url}/policy/pause?drain_s=20"))
        assert not (await asyncio.wait([drain], timeout=0.3))[0]
        held.set()
        await call

        assert {"mode": "wait", "in_flight": 1, "drained": False} == told
        assert {"mode": "wait", "in_flight": 0, "drained": True} == await drain


@pytest.mark.parametrize("drain", ["-1", "soon", "nan", "4000"])
async def test_a_drain_of_no_length_is_refused(proxy, drain):
    """400, and nothing is paused."""
    assert 400 == (await proxy.post(f"/policy/pause?drain_s={drain}")).status
    await proxy.chat("r1")
