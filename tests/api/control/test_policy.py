"""The policy version on steps, and pausing calls."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from fakes import settings_for
from recorded import load

from proxy.server.listener import running


async def recorded_version(proxy, rollout):
    (step, *_) = (await proxy.get(f"/rollouts/{rollout}/steps")).json["steps"]
    return SimpleNamespace(
        start=step["policy_version"],
        end=step["policy_version_end"],
        spans=[s["policy_version"] for s in step["choices"][0]["spans"]],
    )


async def test_steps_have_the_policy_version_that_was_set_before_the_call(proxy):
    """The version is a string; a number is converted."""
    assert {"version": None} == (await proxy.get("/policy")).json
    for number, version in enumerate((None, 12, "main")):
        if version is not None:
            assert {"version": str(version)} == (await proxy.put("/policy", {"version": version})).json
        await proxy.chat(f"r{number}")
    stamps = [await recorded_version(proxy, f"r{number}") for number in range(3)]

    assert [None, "12", "main"] == [version.start for version in stamps]
    assert [[None], ["12"], ["main"]] == [version.spans for version in stamps]
    assert {"version": "main"} == (await proxy.get("/policy")).json


async def test_a_policy_version_applies_to_every_process_once_the_response_is_sent(proxy, store):
    async with running(settings_for(None), store) as other:
        for version in range(5):
            async with proxy.http.put(f"{other.url}/policy", json={"version": version}) as response:
                assert 200 == response.status
            await proxy.chat(f"r{version}")
            assert str(version) == (await recorded_version(proxy, f"r{version}")).start


@pytest.mark.parametrize("body", [{}, {"version": None}, {"version": ""}, {"version": 1.5}, {"version": "x" * 257}])
async def test_an_invalid_policy_version_is_422_and_changes_nothing(proxy, body):
    await proxy.put("/policy", {"version": 1})

    assert 422 == (await proxy.put("/policy", body)).status
    assert {"version": "1"} == (await proxy.get("/policy")).json


@pytest.fixture
async def release(engine):
    """An event that releases the engine's first response; it sends others immediately."""
    event = asyncio.Event()

    async def respond(request, body):
        if len(engine.requests) == 1:
            await event.wait()
        return web.Response(body=load("chat_ids_lp").response, content_type="application/json")

    engine.respond = respond
    return event


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_a_version_set_while_a_call_is_in_flight_is_its_policy_version_end(
    store, http, engine, release, elsewhere
):
    """The step has the versions at its start and its end, also if another process set the second."""
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
        release.set()
        await first
        versions = []
        for rollout in ("r1", "r2"):
            async with http.get(f"{served.url}/rollouts/{rollout}/steps") as response:
                (step,) = (await response.json())["steps"]
                versions.append((step["policy_version"], step["policy_version_end"]))

    assert [("1", "2"), ("2", None)] == versions


async def test_calls_wait_during_a_pause_and_proceed_with_the_new_version(proxy, store):
    """The pause applies to every process."""
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

    assert "2" == (await recorded_version(proxy, "r1")).start


async def test_calls_during_a_pause_with_mode_reject_are_429_with_retry_after(proxy):
    """Nothing is recorded; after resume calls succeed."""
    await proxy.post("/policy/pause", {"mode": "reject"})
    refused = await proxy.post("/rollouts/r1/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    await proxy.post("/policy/resume")
    await proxy.chat("r1")

    assert (429, "paused", "1") == (refused.status, refused.json["error"]["code"], refused.headers["Retry-After"])
    assert 1 == len((await proxy.get("/rollouts/r1/steps")).json["steps"])


async def test_drain_s_waits_for_the_calls_in_flight_of_all_processes(store, http, engine, release):
    """Without `drain_s` their number is returned at once."""
    async with running(settings_for(engine.url), store) as served, running(settings_for(None), store) as other:

        async def send(url, **named):
            async with http.post(url, **named) as response:
                return await response.json()

        body = {"messages": [{"role": "user", "content": "hi"}]}
        call = asyncio.create_task(send(f"{served.url}/rollouts/r1/v1/chat/completions", json=body))
        async with asyncio.timeout(50):
            while not engine.requests:
                await asyncio.sleep(0.01)
        paused = await send(f"{other.url}/policy/pause")
        drain = asyncio.create_task(send(f"{other.url}/policy/pause?drain_s=20"))
        assert not (await asyncio.wait([drain], timeout=0.3))[0]
        release.set()
        await call

        assert {"mode": "wait", "in_flight": 1, "drained": False} == paused
        assert {"mode": "wait", "in_flight": 0, "drained": True} == await drain


@pytest.mark.parametrize("drain", ["-1", "soon", "nan", "4000"])
async def test_an_invalid_drain_s_is_400_and_pauses_nothing(proxy, drain):
    assert 400 == (await proxy.post(f"/policy/pause?drain_s={drain}")).status
    await proxy.chat("r1")
