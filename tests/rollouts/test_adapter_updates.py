"""Updates of the policy by LoRA adapters, at fake engines with vLLM's routes."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.adapters_of_engines import LoraRoutes
from tests.support.fakes import fake_engine, settings_for
from tests.support.recorded import load

from proxy.clock import SystemClock
from proxy.rollouts import adapter_updates
from proxy.rollouts.adapter_updates import ADAPTERS_ANNOUNCEMENT
from proxy.server.listener import running

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def answer(request, body):
    return web.Response(body=load("chat_ids_lp").response, content_type="application/json")


class Fleet:
    """A proxy before engines with adapters."""

    def __init__(self, served, http, engines, routes) -> None:
        self.url, self.http, self.engines, self.routes = served.url, http, engines, routes

    async def call(self, method, path, body=None):
        async with self.http.request(method, self.url + path, json=body) as response:
            return SimpleNamespace(status=response.status, json=await response.json())

    async def load(self, version, *, path=None, **fields):
        body = {"name": "policy", "path": path or f"/v{version}", "version": version, "drain_s": 0, **fields}
        return await self.call("POST", "/policy/adapter", body)

    async def version(self):
        return (await self.call("GET", "/policy")).json["version"]

    async def is_paused(self):
        async with asyncio.timeout(50):
            body = {"messages": BODY["messages"], "model": "policy"}
            return (await self.call("POST", "/rollouts/r/v1/chat/completions", body)).status == 429

    @property
    def paths(self):
        return [routes.adapters.get("policy") for routes in self.routes]


def fleet_settings(engines, **sections):
    endpoints = [{"url": engine.url, "name": f"vllm-{index}"} for index, engine in enumerate(engines)]
    return settings_for(None, engines={"endpoints": endpoints}, agents={"pause_timeout_s": 0.01}, **sections)


@pytest.fixture
async def fleet(store, http):
    """A proxy before two engines. Calls wait 10 ms in a pause."""
    async with fake_engine() as first, fake_engine() as second:
        routes = [LoraRoutes(engine, answer) for engine in (first, second)]
        async with running(fleet_settings((first, second)), store) as served:
            yield Fleet(served, http, (first, second), routes)


async def test_an_adapter_is_loaded_at_all_endpoints_before_its_version_is_announced(fleet):
    """Calls continue afterwards. The same request again succeeds, as after a lost response."""
    responses = [await fleet.load(version) for version in (1, 2, 2)]

    assert [response.status for response in responses] == [200] * 3
    first = {"epoch": 0, "run": None}
    assert {"name": "policy", "path": "/v2", "version": "2", **first, "endpoints": ["vllm-0", "vllm-1"]} == (
        responses[-1].json
    )
    assert (fleet.paths, await fleet.version(), await fleet.is_paused()) == (["/v2", "/v2"], "2", False)


async def test_the_example_of_http_api_md_has_the_request_and_the_response(fleet):
    page = (Path(__file__).parent.parent.parent / "docs" / "http-api.md").read_text()
    request, response = re.search(r"POST /policy/adapter (\{.*\})\n\n(\{.*\})\n", page).groups()

    assert orjson.loads(response) == (await fleet.call("POST", "/policy/adapter", orjson.loads(request))).json


async def test_calls_wait_until_all_endpoints_have_the_adapter(fleet):
    fleet.routes[1].waiting = asyncio.Event()
    update = asyncio.create_task(fleet.load(1))
    await fleet.routes[1].reached.wait()
    paused, version = await fleet.is_paused(), await fleet.version()
    fleet.routes[1].waiting.set()
    await update

    assert (paused, version) == (True, None)
    assert (await fleet.version(), await fleet.is_paused()) == ("1", False)


@pytest.mark.parametrize("before", [None, 1])
async def test_if_an_endpoint_fails_the_others_get_the_adapter_of_before(fleet, before):
    """It is unloaded if there was none. Nothing is announced, and calls continue."""
    if before:
        await fleet.load(before)
    fleet.routes[1].failing = {"/v2"}
    response = await fleet.load(2)

    assert (response.status, response.json["error"]["code"]) == (502, "engine_error")
    assert "Engine vllm-1 did not load the adapter" in response.json["error"]["message"]
    assert fleet.paths == [before and "/v1"] * 2
    assert (await fleet.version(), await fleet.is_paused()) == (before and "1", False)


async def test_calls_stay_paused_if_the_adapter_of_before_cannot_be_restored(fleet):
    """The next update loads all endpoints and resumes."""
    await fleet.load(1)
    fleet.routes[0].failing, fleet.routes[1].failing = {"/v1"}, {"/v2"}
    response = await fleet.load(2)
    paused = await fleet.is_paused()
    again = await fleet.load(3)

    assert (response.status, paused) == (502, True)
    assert "calls stay paused: Engine vllm-0" in response.json["error"]["message"]
    assert (again.status, fleet.paths, await fleet.is_paused()) == (200, ["/v3", "/v3"], False)


async def test_an_unreachable_endpoint_prevents_the_update_and_calls_continue(fleet, http, store):
    """The other endpoint is restored; the unreachable one has no adapter after its restart."""
    endpoints = [
        {"url": fleet.engines[0].url, "name": "vllm-0", "kind": "vllm"},
        {"url": "http://127.0.0.1:9", "name": "dead", "kind": "vllm"},
    ]
    async with running(settings_for(None, engines={"endpoints": endpoints}), store) as served:
        other = Fleet(served, http, (), fleet.routes)
        response = await other.load(1)

    assert "Engine dead is unreachable" in response.json["error"]["message"]
    assert (response.status, fleet.paths[0], await fleet.is_paused()) == (502, None, False)


async def test_an_engine_that_was_never_detected_is_503_before_calls_are_paused(store, http):
    async with running(settings_for("http://127.0.0.1:9"), store) as served:
        response = await Fleet(served, http, (), ()).load(1)

    assert response.status == 503
    assert await store.announcements.read() == {}


async def test_an_endpoint_of_another_kind_is_422_with_its_name(store, http, engine):
    endpoints = [{"url": engine.url, "name": "other", "kind": "sglang"}]
    async with running(settings_for(None, engines={"endpoints": endpoints}), store) as served:
        response = await Fleet(served, http, (), ()).load(1)

    assert (response.status, engine.requests) == (422, [])
    assert "engine other is of kind sglang" in response.json["error"]["message"]


async def test_endpoints_of_other_models_get_no_adapter(store, http, fleet):
    """Without an endpoint for the adapter, the response is 422."""
    endpoints = [
        {"url": engine.url, "name": f"vllm-{index}", "models": [model]}
        for index, (engine, model) in enumerate(zip(fleet.engines, ("pol*", "judge"), strict=True))
    ]
    async with running(settings_for(None, engines={"endpoints": endpoints}), store) as served:
        other = Fleet(served, http, (), fleet.routes)
        response, unknown = await other.load(1), await other.load(1, name="another")

    assert (response.json["endpoints"], fleet.paths) == (["vllm-0"], ["/v1", None])
    assert (unknown.status, unknown.json["error"]["param"]) == (422, "name")


async def test_a_lower_version_is_409_before_anything_is_loaded(fleet):
    """Unless a new epoch begins: the run continues from an earlier version."""
    await fleet.load(5)
    refused = await fleet.load(4)
    before, paused = fleet.paths, await fleet.is_paused()
    other_run = await fleet.load(4, path="/b4", run="b")
    again = await fleet.load(4, path="/b4", run="b")
    epoch = await fleet.load(3, path="/c3", new_epoch=True)

    assert (refused.status, refused.json["error"]["code"]) == (409, "lower_version")
    assert (before, paused) == (["/v5", "/v5"], False)
    assert [
        tuple(response.json[name] for name in ("version", "epoch", "run")) for response in (other_run, again, epoch)
    ] == [("4", 1, "b"), ("4", 1, "b"), ("3", 2, None)]
    assert fleet.paths == ["/c3", "/c3"]


async def test_another_version_at_the_same_path_is_409(fleet):
    """vLLM would reuse prefixes of the other weights."""
    await fleet.load(1, path="/latest")
    response = await fleet.load(2, path="/latest")

    assert (response.status, response.json["error"]["param"]) == (409, "path")
    assert (await fleet.version(), await fleet.is_paused()) == ("1", False)


@pytest.mark.parametrize("in_flight", ["abort", "resume"])
async def test_calls_in_flight_prevent_an_update_or_are_ended(fleet, in_flight):
    """After a refused update, calls continue and no engine has the adapter."""
    hold = asyncio.Event()

    async def respond(request, body):
        await hold.wait()
        return await answer(request, body)

    for routes in fleet.routes:
        routes._then = respond
    call = asyncio.create_task(fleet.call("POST", "/rollouts/r/v1/chat/completions", BODY))
    async with asyncio.timeout(50):
        while not any(engine.requests for engine in fleet.engines):
            await asyncio.sleep(0.01)
    refused = await fleet.load(1, drain_s=0.1)
    paths = fleet.paths
    loaded = await fleet.load(1, in_flight=in_flight)
    hold.set()
    await asyncio.wait([call])

    assert (refused.status, paths) == (409, [None, None])
    assert (loaded.status, fleet.paths) == (200, ["/v1", "/v1"])
    assert in_flight == "resume" or call.exception() is not None


async def test_a_second_update_meanwhile_is_409_in_every_process(fleet, store, http):
    """It does not disturb the first one."""
    fleet.routes[0].waiting = asyncio.Event()
    first = asyncio.create_task(fleet.load(1))
    await fleet.routes[0].reached.wait()
    async with running(fleet_settings(fleet.engines), store) as served:
        second = await Fleet(served, http, fleet.engines, fleet.routes).load(2)
    fleet.routes[0].waiting.set()

    assert (second.status, (await first).status) == (409, 200)
    assert (fleet.paths, await fleet.version(), await fleet.is_paused()) == (["/v1", "/v1"], "1", False)


async def test_an_update_continues_if_its_client_disconnects(fleet):
    fleet.routes[0].waiting = asyncio.Event()
    update = asyncio.create_task(fleet.load(1))
    await fleet.routes[0].reached.wait()
    update.cancel()
    await asyncio.wait([update])
    fleet.routes[0].waiting.set()
    async with asyncio.timeout(50):
        while await fleet.version() is None or await fleet.is_paused():
            await asyncio.sleep(0.01)

    assert fleet.paths == ["/v1", "/v1"]


async def test_the_update_of_a_process_that_stopped_is_repeated_by_another_one(fleet, store, http):
    """Calls stay paused until then."""
    async with running(fleet_settings(fleet.engines, drain_timeout_s=0.1), store) as served:
        fleet.routes[1].waiting = asyncio.Event()
        update = asyncio.create_task(Fleet(served, http, fleet.engines, fleet.routes).load(1))
        await fleet.routes[1].reached.wait()
    await asyncio.wait([update])
    fleet.routes[1].waiting = None
    paused, version = await fleet.is_paused(), await fleet.version()
    again = await fleet.load(1)

    assert (paused, version, again.status) == (True, None, 200)
    assert (fleet.paths, await fleet.version(), await fleet.is_paused()) == (["/v1", "/v1"], "1", False)


async def test_an_owner_that_lost_its_lease_announces_nothing_and_does_not_resume(fleet, store):
    """The other owner does."""
    fleet.routes[0].waiting = asyncio.Event()
    update = asyncio.create_task(fleet.load(1))
    await fleet.routes[0].reached.wait()
    await store.announcements.announce(
        ADAPTERS_ANNOUNCEMENT, orjson.dumps({"loaded": {}, "owner": "other", "until_ms": 0})
    )
    fleet.routes[0].waiting.set()
    response = await update

    assert (response.status, await fleet.version(), await fleet.is_paused()) == (409, None, True)


@pytest.mark.parametrize(("lease_ms", "status"), [(60_000, 409), (-1, 200)])
async def test_the_lease_of_a_killed_process_prevents_updates_until_it_expires(fleet, store, lease_ms, status):
    until_ms = SystemClock().now_ms() + lease_ms
    await store.announcements.announce(
        ADAPTERS_ANNOUNCEMENT, orjson.dumps({"loaded": {}, "owner": "killed", "until_ms": until_ms})
    )

    assert status == (await fleet.load(1)).status


async def test_a_lease_is_renewed_while_engines_load(fleet, store, monkeypatch):
    monkeypatch.setattr(adapter_updates, "_RENEWAL_S", 0.01)
    fleet.routes[0].waiting = asyncio.Event()
    update = asyncio.create_task(fleet.load(1))
    await fleet.routes[0].reached.wait()
    ends = set()
    async with asyncio.timeout(50):
        while len(ends) < 3:
            ends.add(orjson.loads((await store.announcements.read())[ADAPTERS_ANNOUNCEMENT].value)["until_ms"])
            await asyncio.sleep(0.01)
    fleet.routes[0].waiting.set()

    assert (await update).status == 200
    assert orjson.loads((await store.announcements.read())[ADAPTERS_ANNOUNCEMENT].value)["until_ms"] == 0


@settings(max_examples=15)
@given(updates=st.lists(st.sets(st.sampled_from([0, 1])), min_size=1, max_size=5))
async def test_all_endpoints_have_the_adapter_of_the_announced_version(fleet, updates):
    """Each update fails at some endpoints."""
    base = int(await fleet.version() or 0)
    for number, failing in enumerate(updates, base + 1):
        for index, routes in enumerate(fleet.routes):
            routes.failing = {f"/v{number}"} if index in failing else set()
        response = await fleet.load(number)
        version = await fleet.version()

        assert (502 if failing else 200) == response.status
        assert fleet.paths == [version and f"/v{version}"] * 2


TWO = {"planner": {"models": ["planner"]}, "judge": {"models": ["judge-*"]}}


class TwoPolicies(Fleet):
    """A proxy with two named policies."""

    async def load_of(self, policy, version, **fields):
        body = {"path": f"/{policy}{version}", "version": version, "drain_s": 0, **fields}
        return await self.call("POST", f"/policies/{policy}/adapter", body)

    async def policies(self):
        listed = (await self.call("GET", "/policies")).json["policies"]
        return {policy["name"]: (policy["version"], policy["mode"]) for policy in listed}


@pytest.fixture
async def two(store, http):
    """Two named policies before two engines."""
    async with fake_engine() as first, fake_engine() as second:
        routes = [LoraRoutes(engine, answer) for engine in (first, second)]
        async with running(fleet_settings((first, second), policies=TWO), store) as served:
            yield TwoPolicies(served, http, (first, second), routes)


async def test_the_only_model_of_a_policy_is_the_name_of_its_adapter(two):
    """A policy with several models, or a pattern, requires the name."""
    planner = await two.load_of("planner", 1)
    unnamed, judge = await two.load_of("judge", 1), await two.load_of("judge", 1, name="judge-a")

    assert (planner.json["name"], judge.json["name"]) == ("planner", "judge-a")
    assert (unnamed.status, unnamed.json["error"]["param"]) == (422, "name")
    assert [routes.adapters for routes in two.routes] == [{"planner": "/planner1", "judge-a": "/judge1"}] * 2
    assert await two.policies() == {"planner": ("1", None), "judge": ("1", None), "default": (None, None)}


async def test_two_policies_are_updated_at_the_same_time(two):
    """While the engines load one, calls of the other continue; a second update of the same policy is 409."""
    for routes in two.routes:
        routes.waiting = asyncio.Event()
    planner = asyncio.create_task(two.load_of("planner", 1))
    await two.routes[0].reached.wait()
    during = await two.policies()
    judge = asyncio.create_task(two.load_of("judge", 7, name="judge-a"))
    async with asyncio.timeout(50):
        while (await two.policies())["judge"][1] is None:
            await asyncio.sleep(0.01)
    other = await two.call("POST", "/rollouts/r/v1/chat/completions", {**BODY, "model": "other"})
    again = await two.load_of("planner", 2)
    for routes in two.routes:
        routes.waiting.set()

    assert during == {"planner": (None, "wait"), "judge": (None, None), "default": (None, None)}
    assert (other.status, again.status, (await planner).status, (await judge).status) == (200, 409, 200, 200)
    assert await two.policies() == {"planner": ("1", None), "judge": ("7", None), "default": (None, None)}


async def test_a_failed_update_leaves_the_other_policy(two):
    """The adapter of before is restored for its policy only, and the same path is free for another policy."""
    await two.load_of("planner", 1)
    await two.load_of("judge", 1, name="judge-a", path="/shared")
    two.routes[1].failing = {"/planner2"}
    failed = await two.load_of("planner", 2)
    shared = await two.load_of("planner", 3, path="/shared")

    assert (failed.status, shared.status) == (502, 200)
    assert [routes.adapters for routes in two.routes] == [{"planner": "/shared", "judge-a": "/shared"}] * 2
    assert await two.policies() == {"planner": ("3", None), "judge": ("1", None), "default": (None, None)}


@settings(max_examples=10)
@given(
    updates=st.lists(
        st.tuples(st.sampled_from(["planner", "judge"]), st.sampled_from([None, 0, 1])), min_size=1, max_size=6
    )
)
async def test_all_endpoints_have_the_adapters_of_the_announced_version_of_each_policy(two, updates):
    """Some updates fail at one endpoint."""
    names = {"planner": "planner", "judge": "judge-a"}
    for policy, failing in updates:
        number = 1 + max(int(version or 0) for version, _ in (await two.policies()).values())
        for index, routes in enumerate(two.routes):
            routes.failing = {f"/{policy}{number}"} if index == failing else set()
        response = await two.load_of(policy, number, name=names[policy])

        assert (200 if failing is None else 502) == response.status
        versions = await two.policies()
        announced = {names[name]: f"/{name}{versions[name][0]}" for name in names if versions[name][0]}
        assert [routes.adapters for routes in two.routes] == [announced] * 2
        assert {mode for _, mode in versions.values()} == {None}
