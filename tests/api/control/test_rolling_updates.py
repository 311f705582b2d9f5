"""Endpoints of a policy that a rolling update holds, and their versions."""

import pytest
from tests.support.fakes import fake_engine, settings_for

from proxy.server.listener import running

HELD = {"endpoints": ["first"], "in_flight": "resume"}


@pytest.fixture
async def send(store, http):
    """Send requests to one of two processes before two engines; return the status and the JSON of the response."""
    async with fake_engine() as first, fake_engine() as second:
        endpoints = [{"url": engine.url, "name": name} for engine, name in ((first, "first"), (second, "second"))]
        settings = settings_for(None, engines={"endpoints": endpoints})
        async with running(settings, store) as served, running(settings, store) as other:
            urls = (served.url, other.url)

            async def send(method, path, body=None, *, at=0):
                async with http.request(method, urls[at] + path, json=body) as response:
                    return response.status, await response.json()

            yield send


async def shown(send, at):
    """What a process shows of the endpoints of the policy."""
    _, found = await send("GET", "/policies", at=at)
    (policy,) = found["policies"]
    return policy["version"], policy.get("held"), policy.get("versions")


async def test_a_held_endpoint_is_shown_by_all_processes_until_it_is_released(send):
    """Then it has its own version until the next one of the policy is announced."""
    await send("PUT", "/policy", {"version": 1})
    paused = await send("POST", "/policy/pause?drain_s=5", HELD)
    held = [await shown(send, at) for at in (0, 1)]
    released = await send("POST", "/policy/resume", {"endpoints": ["first"], "version": 2}, at=1)
    ahead = [await shown(send, at) for at in (0, 1)]
    await send("PUT", "/policy", {"version": 2})

    assert paused == (200, {"mode": None, "in_flight": 0, "drained": True, "held": ["first"], "versions": {}})
    assert held == [("1", ["first"], {})] * 2
    assert released == (200, {"mode": None, "held": [], "versions": {"first": "2"}})
    assert ahead == [("1", [], {"first": "2"})] * 2
    assert [await shown(send, at) for at in (0, 1)] == [("2", None, None)] * 2


async def test_the_end_of_a_pause_releases_all_endpoints(send):
    """A trainer that died in a rolling update has left one held."""
    await send("POST", "/policy/pause", HELD)
    await send("POST", "/policy/pause", {"in_flight": "resume"}, at=1)
    _, resumed = await send("POST", "/policy/resume", at=1)

    assert (resumed, await shown(send, 0)) == ({"mode": None, "in_flight": 0}, (None, None, None))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pause", {"endpoints": ["first"]}),
        ("pause", {"endpoints": ["first"], "in_flight": "abort"}),
        ("pause", {**HELD, "mode": "reject"}),
        ("pause", {**HELD, "endpoints": []}),
        ("pause", {**HELD, "endpoints": ["third"]}),
        ("pause", {**HELD, "endpoints": "first"}),
        ("resume", {"endpoints": []}),
        ("resume", {"version": 2}),
        ("resume", {"new_epoch": True}),
        ("resume", {"endpoints": ["first"], "version": ""}),
    ],
)
async def test_an_invalid_hold_or_release_is_422_and_changes_nothing(send, path, body):
    status, _ = await send("POST", f"/policy/{path}", body)

    assert (status, await shown(send, 0)) == (422, (None, None, None))


async def test_an_unknown_endpoint_is_named_with_those_that_exist(send):
    """One that is no endpoint any more can be released."""
    _, refused = await send("POST", "/policy/pause", {**HELD, "endpoints": ["first", "third"]})
    status, _ = await send("POST", "/policy/resume", {"endpoints": ["third"]})

    assert refused["error"]["message"] == "Engine 'third' not found. The engines are first, second."
    assert (refused["error"]["param"], status) == ("endpoints", 200)


async def test_a_release_with_a_lower_version_is_409_and_the_endpoint_stays_held(send):
    await send("PUT", "/policy", {"version": 5, "run": "a"})
    await send("POST", "/policy/pause", HELD)
    lower, refused = await send("POST", "/policy/resume", {"endpoints": ["first"], "version": 4})
    still = await shown(send, 1)
    status, released = await send("POST", "/policy/resume", {"endpoints": ["first"], "version": 4, "run": "b"})

    assert (lower, refused["error"]["code"], still[1]) == (409, "lower_version", ["first"])
    assert (status, released["versions"]) == (200, {"first": "4"})


async def test_engines_are_listed_with_the_policies_of_their_models(store, http):
    """Of an engine with unknown models, with all."""
    policies = {"planner": {"models": ["planner", "planner-*"]}, "judge": {"models": ["judge"]}}
    models = {"both": ["planner-7b", "judge"], "any": ["*"], "other": ["gpt"], "judges": ["judge-*", "judge"]}
    async with fake_engine() as engine:
        endpoints = [{"url": engine.url + f"/{name}", "name": name, "models": of} for name, of in models.items()]
        endpoints.append({"url": "http://127.0.0.1:9", "name": "unknown"})
        settings = settings_for(None, engines={"endpoints": endpoints}, policies=policies)
        async with running(settings, store) as served, http.get(f"{served.url}/engines") as response:
            found = {engine["name"]: engine["policies"] for engine in (await response.json())["engines"]}

    assert found == {
        "both": ["planner", "judge"],
        "any": ["planner", "judge", "default"],
        "other": ["default"],
        "judges": ["judge", "default"],
        "unknown": ["planner", "judge", "default"],
    }
