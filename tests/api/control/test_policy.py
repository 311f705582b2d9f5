"""The policy version on steps, and pausing calls."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import ServerDisconnectedError, web
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.stored import stored_steps, wait_for_steps

from proxy.api.model.call import Call
from proxy.server.listener import running

FIRST = {"epoch": 0, "run": None}


async def recorded_version(proxy, rollout):
    (step, *_) = await proxy.steps(rollout)
    return SimpleNamespace(
        start=step["policy_version"],
        end=step["policy_version_end"],
        spans=[s["policy_version"] for s in step["choices"][0]["spans"]],
    )


async def test_steps_have_the_policy_version_that_was_set_before_the_call(proxy):
    """The version is a string; a number is converted."""
    assert (await proxy.get("/policy")).json == {"version": None, **FIRST}
    for number, version in enumerate((None, 12, "main")):
        if version is not None:
            announced = (await proxy.put("/policy", {"version": version})).json
            assert {"version": str(version), **FIRST} == {name: announced[name] for name in ("version", *FIRST)}
        await proxy.chat(f"r{number}")
    stamps = [await recorded_version(proxy, f"r{number}") for number in range(3)]

    assert [version.start for version in stamps] == [None, "12", "main"]
    assert [version.spans for version in stamps] == [[None], ["12"], ["main"]]
    assert (await proxy.get("/policy")).json == {"version": "main", **FIRST, "highest": 12}


async def test_a_policy_version_applies_to_every_process_once_the_response_is_sent(proxy, store):
    async with running(settings_for(None), store) as other:
        for version in range(5):
            async with proxy.http.put(f"{other.url}/policy", json={"version": version}) as response:
                assert response.status == 200
            await proxy.chat(f"r{version}")
            assert str(version) == (await recorded_version(proxy, f"r{version}")).start


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"version": None},
        {"version": ""},
        {"version": 1.5},
        {"version": "x" * 257},
        {"version": 2, "run": ""},
        {"version": 2, "run": 7},
        {"version": 2, "run": "x" * 257},
        {"version": 2, "new_epoch": "yes"},
        {"version": 2, "epoch": 3},
    ],
)
async def test_an_invalid_policy_version_is_422_and_changes_nothing(proxy, body):
    await proxy.put("/policy", {"version": 1})

    assert (await proxy.put("/policy", body)).status == 422
    assert (await proxy.get("/policy")).json == {"version": "1", **FIRST}


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
                assert response.status == 200

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

    assert versions == [("1", "2"), ("2", None)]


async def test_a_process_learns_of_a_version_without_a_new_call(store, http, engine, release):
    """A pause returns once every process has read the announcements."""
    async with running(settings_for(engine.url), store) as served, running(settings_for(None), store) as other:
        url = f"{served.url}/rollouts/r1/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        call = asyncio.ensure_future(http.post(url, json=body).__aenter__())
        await engine.reached.wait()
        for method, path, fields in (("PUT", "/policy", {"version": 2}), ("POST", "/policy/pause", {})):
            async with http.request(method, other.url + path, json=fields) as response:
                assert response.status == 200
        release.set()
        await (await call).read()

    (step,) = await stored_steps(store, "r1")
    assert (step.policy_version, step.policy_version_end) == (None, "2")


async def test_calls_wait_during_a_pause_and_proceed_with_the_new_version(proxy, store):
    """The pause applies to every process."""
    async with running(settings_for(None), store) as other:
        async with proxy.http.post(f"{other.url}/policy/pause", json={"mode": "wait"}) as response:
            assert await response.json() == {"mode": "wait", "in_flight": 0, "drained": True}
        call = asyncio.create_task(proxy.chat("r1"))
        done, _ = await asyncio.wait([call], timeout=0.3)
        assert not done
        await proxy.put("/policy", {"version": 2})
        async with proxy.http.post(f"{other.url}/policy/resume") as response:
            assert await response.json() == {"mode": None, "in_flight": 0}
        await call

    assert (await recorded_version(proxy, "r1")).start == "2"


async def test_calls_during_a_pause_with_mode_reject_are_429_with_retry_after(proxy):
    """Nothing is recorded; after resume calls succeed."""
    await proxy.post("/policy/pause", {"mode": "reject"})
    refused = await proxy.post("/rollouts/r1/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    await proxy.post("/policy/resume")
    await proxy.chat("r1")

    assert (refused.status, refused.json["error"]["code"], refused.headers["Retry-After"]) == (429, "paused", "1")
    assert len(await proxy.steps("r1")) == 1


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

        assert paused == {"mode": "wait", "in_flight": 1, "drained": False}
        assert await drain == {"mode": "wait", "in_flight": 0, "drained": True}


async def test_an_unknown_choice_for_calls_in_flight_is_422_and_pauses_nothing(proxy):
    assert (await proxy.post("/policy/pause", {"in_flight": "kill"})).status == 422
    await proxy.chat("r1")


@pytest.mark.parametrize("drain", ["-1", "soon", "nan", "4000"])
async def test_an_invalid_drain_s_is_400_and_pauses_nothing(proxy, drain):
    assert (await proxy.post(f"/policy/pause?drain_s={drain}")).status == 400
    await proxy.chat("r1")


async def test_a_pause_that_aborts_stops_the_calls_of_all_processes_at_the_engine(store, http, engine):
    """Their steps are partial with the reason. Queued calls are neither sent nor recorded. Later calls are not aborted."""
    engine.hangs()
    endpoints = [{"url": engine.url, "name": "fake", "max_in_flight": 1}]
    settings = settings_for(None, engines={"endpoints": endpoints})
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with running(settings, store) as served, running(settings_for(None), store) as other:

        async def call(rollout):
            async with http.post(f"{served.url}/rollouts/{rollout}/v1/chat/completions", json=body) as response:
                return response.status

        calls = [asyncio.create_task(call(rollout)) for rollout in ("sent", "queued")]
        await engine.reached.wait()
        async with http.post(f"{other.url}/policy/pause", json={"in_flight": "abort"}) as response:
            paused = await response.json()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        await engine.aborted.wait()
        engine.respond = answer
        later = asyncio.create_task(call("later"))
        assert not (await asyncio.wait([later], timeout=0.3))[0]
        async with http.post(f"{other.url}/policy/resume") as response:
            await response.read()
        status = await later

    assert paused == {"mode": "wait", "in_flight": 0, "drained": True}
    assert [type(error) for error in ended] == [ServerDisconnectedError] * 2
    ((step,), queued) = (await wait_for_steps(store, "sent"), await stored_steps(store, "queued"))
    assert (step.status, step.reason) == ("partial", "the call was aborted because the weights changed")
    assert (queued, status, len(engine.requests)) == ([], 200, 2)


async def answer(request, body):
    return web.Response(body=load("chat_ids_lp").response, content_type="application/json")


async def test_a_pause_that_resumes_interrupts_the_calls_of_all_processes(store, http, engine, monkeypatch):
    """At once, and after `drain_s` those that would lose what was sampled; the pause of another policy interrupts none."""
    engine.hangs()
    interrupted = []
    monkeypatch.setattr(Call, "interrupt", lambda call, reason, *, is_last: interrupted.append(is_last))
    settings = settings_for(engine.url, policies={"judge": {"models": ["judge"]}})
    async with running(settings, store) as served, running(settings, store) as other:
        url = f"{served.url}/rollouts/r1/v1/chat/completions"
        call = asyncio.create_task(http.post(url, json={"messages": [{"role": "user", "content": "hi"}]}).__aenter__())
        await engine.reached.wait()
        for path in ("/policies/judge/pause", "/policy/pause?drain_s=0.2"):
            assert not interrupted
            monkeypatch.setattr("proxy.rollouts.policy._ABORT_TIMEOUT_S", 0.5)
            async with http.post(other.url + path, json={"in_flight": "resume"}) as response:
                paused = await response.json()
        call.cancel()

    assert paused == {"mode": "wait", "in_flight": 1, "drained": False}
    assert list(dict.fromkeys(interrupted)) == [False, True]


async def test_calls_that_end_within_drain_s_are_not_aborted(store, http, engine, release):
    async with running(settings_for(engine.url), store) as served:

        async def send(path, body):
            async with http.post(served.url + path, json=body) as response:
                return await response.json()

        body = {"messages": [{"role": "user", "content": "hi"}]}
        call = asyncio.create_task(send("/rollouts/r1/v1/chat/completions", body))
        await engine.reached.wait()
        pause = asyncio.create_task(send("/policy/pause?drain_s=20", {"in_flight": "abort"}))
        assert not (await asyncio.wait([pause], timeout=0.3))[0]
        release.set()
        await call

        assert await pause == {"mode": "wait", "in_flight": 0, "drained": True}
    assert [step.status for step in await stored_steps(store, "r1")] == ["complete"]


async def test_a_call_that_its_engine_has_completed_does_not_delay_a_pause_that_aborts(store, http, engine):
    """Its step is stored and its response is written."""
    engine.respond = answer
    proceed = asyncio.Event()
    store.waiting["append"], store.reached["append"] = proceed, asyncio.Event()
    async with running(settings_for(engine.url), store) as served:
        url = f"{served.url}/rollouts/r1/v1/chat/completions"
        call = asyncio.create_task(http.post(url, json={"messages": [{"role": "user", "content": "hi"}]}).__aenter__())
        await store.reached["append"].wait()
        async with http.post(f"{served.url}/policy/pause", json={"in_flight": "abort"}) as response:
            assert await response.json() == {"mode": "wait", "in_flight": 0, "drained": True}
        proceed.set()
        response = await call
        await response.read()

    assert (response.status, [step.status for step in await stored_steps(store, "r1")]) == (200, ["complete"])


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": None},
        {"path": ""},
        {"version": ""},
        {"version": 1.5},
        {"drain_s": -1},
        {"drain_s": 4000},
        {"in_flight": "keep"},
        {"mode": "stop"},
        {"rank": 8},
    ],
)
async def test_an_invalid_adapter_is_422_and_pauses_nothing(proxy, fields):
    body = {"name": "policy", "path": "/adapters/1", "version": 1, **fields}
    assert (await proxy.post("/policy/adapter", body)).status == 422
    await proxy.chat("r1")
