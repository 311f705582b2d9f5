"""Several policies with one store: their versions, pauses and aborts are independent."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
from aiohttp import ServerDisconnectedError, web
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.stored import stored_steps, wait_for_steps

from proxy.server.listener import running

POLICIES = {"planner": {"models": ["planner", "planner-*"]}, "judge": {"models": ["judge"], "train": False}}
FIRST = {"epoch": 0, "run": None}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sections():
    return {"policies": POLICIES, "agents": {"pause_timeout_s": 50}}


async def recorded(store, *rollouts):
    """Return the policy and its version in the first step of each rollout."""
    steps = [(await stored_steps(store, rollout))[0] for rollout in rollouts]
    return [(step.policy, step.policy_version) for step in steps]


async def test_steps_have_the_policy_of_their_model_and_its_version(proxy, store):
    """A version of one policy changes no other; `/policies/default` is `/policy`."""
    for policy, version in (("planner", 3), ("judge", "j1"), ("default", 9)):
        announced = (await proxy.put(f"/policies/{policy}", {"version": version})).json
        assert (str(version), 0, None) == tuple(announced[name] for name in ("version", "epoch", "run"))
    for model in ("planner", "planner-7b", "judge", "other"):
        await proxy.chat(model, model=model)

    assert await recorded(store, "planner", "planner-7b", "judge", "other") == [
        ("planner", "3"),
        ("planner", "3"),
        ("judge", "j1"),
        ("default", "9"),
    ]
    assert (await proxy.get("/policy")).json == (await proxy.get("/policies/default")).json == {"version": "9", **FIRST}
    assert (await proxy.get("/policies/planner")).json == {"version": "3", **FIRST}


async def test_the_policies_are_listed_with_models_versions_and_pauses(proxy):
    """In the order of the settings; the default policy is always there."""
    await proxy.put("/policies/judge", {"version": 4})
    await proxy.post("/policies/planner/pause", {"mode": "reject"})

    assert (await proxy.get("/policies")).json["policies"] == [
        {
            "name": "planner",
            "models": ["planner", "planner-*"],
            "train": True,
            "version": None,
            **FIRST,
            "mode": "reject",
        },
        {"name": "judge", "models": ["judge"], "train": False, "version": "4", **FIRST, "mode": None},
        {"name": "default", "models": [], "train": False, "version": None, **FIRST, "mode": None},
    ]


async def test_a_pause_holds_the_calls_of_its_policy_only(proxy, store):
    """At every process of the store; the held call has the version that is announced meanwhile."""
    async with running(settings_for(None, policies=POLICIES), store) as other:
        async with proxy.http.post(f"{other.url}/policies/planner/pause") as response:
            assert await response.json() == {"mode": "wait", "in_flight": 0, "drained": True}
        held = asyncio.create_task(proxy.chat("planner", model="planner-7b"))
        await proxy.chat("judge", model="judge")
        await proxy.chat("other", model="other")
        assert not held.done()
        await proxy.put("/policies/planner", {"version": 2})
        async with proxy.http.post(f"{other.url}/policies/planner/resume") as response:
            assert await response.json() == {"mode": None, "in_flight": 0}
        await held

    assert await recorded(store, "planner", "judge") == [("planner", "2"), ("judge", None)]


async def test_a_pause_that_rejects_names_its_route_and_rejects_calls_of_its_policy_only(proxy):
    await proxy.post("/policies/judge/pause", {"mode": "reject"})
    refused = await proxy.post("/v1/chat/completions", {"model": "judge", "messages": MESSAGES})
    await proxy.chat("planner", model="planner")

    assert (refused.status, refused.json["error"]["code"], refused.headers["Retry-After"]) == (429, "paused", "1")
    assert "POST /policies/judge/pause" in refused.json["error"]["message"]


async def test_the_pause_of_the_default_policy_holds_no_named_policy(proxy):
    await proxy.post("/policy/pause", {"mode": "reject"})
    await proxy.chat("planner", model="planner")

    assert (await proxy.post("/v1/chat/completions", {"model": "other", "messages": MESSAGES})).status == 429


@pytest.fixture
async def fleet(store, http, engine):
    """Two proxies with one store and one engine, which answers calls of `judge` and none of `planner`."""
    answered = load("chat_ids_lp").response

    async def respond(request, body):
        if body["model"] == "planner":
            engine.planner_reached.set()
            await asyncio.Event().wait()
        return web.Response(body=answered, content_type="application/json")

    engine.respond, engine.planner_reached = respond, asyncio.Event()
    async with AsyncExitStack() as stack:
        settings = [settings_for(url, policies=POLICIES) for url in (engine.url, None)]
        served = [await stack.enter_async_context(running(each, store)) for each in settings]

        async def send(process, path, body=None):
            async with http.post(served[process].url + path, json=body) as response:
                return await response.json()

        yield SimpleNamespace(send=send, url=served[1].url)


async def test_a_drain_waits_for_the_calls_of_its_policy_only(fleet, engine):
    """`in_flight` and `drained` count the policy's calls, in any process."""
    call = asyncio.create_task(
        fleet.send(0, "/rollouts/p/v1/chat/completions", {"model": "planner", "messages": MESSAGES})
    )
    await engine.planner_reached.wait()

    assert await fleet.send(1, "/policies/judge/pause?drain_s=20") == {"mode": "wait", "in_flight": 0, "drained": True}
    assert await fleet.send(1, "/policy/pause?drain_s=20") == {"mode": "wait", "in_flight": 0, "drained": True}
    assert await fleet.send(1, "/policies/planner/pause") == {"mode": "wait", "in_flight": 1, "drained": False}
    call.cancel()


async def test_an_abort_stops_the_calls_of_its_policy_only(fleet, engine, store):
    """The aborted call is a partial step of its policy."""
    judged = asyncio.Event()
    store.waiting["append"], store.reached["append"] = judged, asyncio.Event()
    path = "/rollouts/{}/v1/chat/completions"
    planner = asyncio.create_task(fleet.send(0, path.format("p"), {"model": "planner", "messages": MESSAGES}))
    await engine.planner_reached.wait()
    judge = asyncio.create_task(fleet.send(0, path.format("j"), {"model": "judge", "messages": MESSAGES}))
    await store.reached["append"].wait()
    unrelated = await fleet.send(1, "/policies/judge/pause", {"in_flight": "abort"})
    assert not planner.done()
    paused = await fleet.send(1, "/policies/planner/pause", {"in_flight": "abort"})
    judged.set()
    with pytest.raises(ServerDisconnectedError):
        await planner
    await judge
    (step,) = await wait_for_steps(store, "p")

    assert unrelated == paused == {"mode": "wait", "in_flight": 0, "drained": True}
    assert (
        step.policy, step.status, step.reason,
    ) == ("planner", "partial", "the call was aborted because the weights changed")  # fmt: skip
    assert [(step.policy, step.status) for step in await stored_steps(store, "j")] == [("judge", "complete")]


async def test_the_version_at_the_end_of_a_call_is_its_policys(fleet, engine, store, http):
    """A version of another policy, announced meanwhile, is none of the call's."""
    call = asyncio.create_task(
        fleet.send(0, "/rollouts/p/v1/chat/completions", {"model": "planner", "messages": MESSAGES})
    )
    await engine.planner_reached.wait()
    for policy, version in (("judge", 8), ("planner", 2), ("default", 9)):
        async with http.put(f"{fleet.url}/policies/{policy}", json={"version": version}) as response:
            assert response.status == 200
    await fleet.send(1, "/policies/planner/pause", {"in_flight": "abort"})
    with pytest.raises(ServerDisconnectedError):
        await call
    (step,) = await wait_for_steps(store, "p")

    assert (step.policy_version, step.policy_version_end) == (None, "2")


ROUTES = [("GET", ""), ("PUT", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/adapter")]


@pytest.mark.parametrize("name", ["critic", "Planner", "planner%2F", "p" * 300, "%00", "planner%20"])
async def test_an_unknown_policy_is_404_in_every_route_and_changes_nothing(proxy, store, name):
    """The message lists the policies."""
    body = {"name": "planner", "path": "/a", "version": 1}
    for method, route in ROUTES:
        response = await proxy.call(method, f"/policies/{name}{route}", json=body)
        assert (response.status, response.json["error"]["code"]) == (404, "not_found"), (method, route)
        assert "planner, judge, default" in response.json["error"]["message"]

    assert await store.announcements.read() == {}


@pytest.mark.parametrize(
    ("method", "route", "body", "status"),
    [
        ("PUT", "", b"{", 400),
        ("PUT", "", b"[]", 400),
        ("PUT", "", b'{"version": null}', 422),
        ("PUT", "", b'{"version": 1, "policy": "judge"}', 422),
        ("POST", "/pause", b'{"mode": "stop"}', 422),
        ("POST", "/pause", b'{"in_flight": "kill"}', 422),
        ("POST", "/pause", b"7", 400),
        ("POST", "/pause?drain_s=soon", b"{}", 400),
        ("POST", "/adapter", b'{"path": "/a"}', 422),
        ("POST", "/adapter", b'{"path": 5, "version": 1, "name": "planner"}', 422),
        ("POST", "/adapter", b'{"path": "/a", "version": 1, "name": "judge"}', 422),
        ("POST", "/adapter", b'{"path": "/a", "version": 1, "name": "other"}', 422),
        ("POST", "/adapter", b'{"path": "/a", "version": 1}', 422),
    ],
)
async def test_an_invalid_request_changes_nothing(proxy, store, method, route, body, status):
    """An adapter is a model of its policy, and is named if the policy has several models."""
    assert status == (await proxy.call(method, f"/policies/planner{route}", data=body)).status
    assert await store.announcements.read() == {}


async def test_a_model_that_no_policy_lists_is_logged_once(proxy, store, caplog):
    """Its calls have the policy `default`."""
    for model in ("other", "planner", "other"):
        await proxy.chat(model, model=model)

    assert [record.fields["model"] for record in caplog.records if "No policy" in record.message] == ["other"]
    assert await recorded(store, "other") == [("default", None)]


async def test_a_process_without_the_policies_records_and_pauses_their_calls_as_default(proxy, store, http, engine):
    """All processes of a store need the same policies; `GET /policies` shows the policies of the responding process."""
    engine.plays(load("chat_ids_lp"))
    path, body = "/rollouts/{}/v1/chat/completions", {"model": "planner", "messages": MESSAGES}
    async with running(settings_for(engine.url), store) as other:
        await proxy.post("/policies/planner/pause", {"mode": "reject"})
        async with http.post(other.url + path.format("elsewhere"), json=body) as sent:
            assert sent.status == 200
        async with http.get(f"{other.url}/policies") as response:
            names = [policy["name"] for policy in (await response.json())["policies"]]
        async with http.put(f"{other.url}/policies/planner", json={"version": 1}) as unknown:
            assert unknown.status == 404
        refused = await proxy.post(path.format("here"), body)

    assert (names, refused.status) == (["default"], 429)
    assert await recorded(store, "elsewhere") == [("default", None)]
