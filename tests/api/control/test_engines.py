"""/engines: the state of the endpoints, and replacing them."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.support.adapters_of_engines import LoraRoutes
from tests.support.fakes import fake_engine, proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps

WHOLE = load("chat_ids_lp")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEY = {"Authorization": "Bearer control"}
GUARDED = {"control": {"api_keys": ["control"]}}


async def call(http, method, url, body=None, headers=KEY):
    async with http.request(method, url, json=body, headers=headers) as response:
        payload = await response.json() if response.content_type == "application/json" else await response.text()
        return SimpleNamespace(status=response.status, payload=payload)


async def put(http, served, *endpoints, **named):
    return await call(http, "PUT", served.url + "/engines", {"endpoints": list(endpoints)}, **named)


@pytest.fixture
async def engines():
    """Three engines that respond to every call."""
    async with fake_engine() as first, fake_engine() as second, fake_engine() as third:
        for engine in (first, second, third):
            engine.plays(WHOLE)
        yield first, second, third


async def chat(http, served, rollout):
    return (await call(http, "POST", f"{served.url}/rollouts/{rollout}/v1/chat/completions", BODY, {})).status


async def test_an_engine_is_listed_with_its_version_state_and_losses(store, http):
    """API keys are not listed."""
    async with fake_engine() as engine, proxying(engine.url, store) as served:
        payload = (await call(http, "GET", served.url + "/engines", headers={})).payload
    (shown,) = payload["engines"]

    assert payload["configured"]
    assert ("fake", engine.url, "vllm", "0.32.0", True, 0, 0, 0, None, None) == tuple(
        shown[name]
        for name in (
            "name", "url", "kind", "version", "healthy", "faults", "in_flight", "queued", "ejected_until", "last_fault"
        )
    )  # fmt: skip
    assert "api_key" not in shown
    assert shown["streams"] == {"chat": "live", "completions": "live"}
    assert any("include_reasoning" in loss for loss in shown["loses"])


async def test_an_engine_is_listed_with_the_models_that_it_serves_now(store, http, engine):
    """Adapters are loaded and unloaded at run time; configured models are not requested."""
    shown = []
    routes = LoraRoutes(engine)
    async with proxying(engine.url, store) as served:
        for adapters in ({"a": "/a", "b": "/b"}, {"b": "/b"}):
            routes.adapters = adapters
            (listed,) = (await call(http, "GET", served.url + "/engines", headers={})).payload["engines"]
            shown.append(listed["models"])
    endpoints = [{"url": engine.url, "name": "fake", "models": ["m"]}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        (listed,) = (await call(http, "GET", served.url + "/engines", headers={})).payload["engines"]

    assert [*shown, listed["models"]] == [["/a", "/b", "a", "b"], ["/b", "b"], ["m"]]


async def test_an_ejected_endpoint_is_listed_with_the_end_of_its_ejection_and_its_last_fault(store, http):
    engines = {
        "endpoints": [{"url": "http://127.0.0.1:9", "name": "dead"}],
        "base_ejection_s": 600,
        "max_ejection_s": 600,
    }
    async with proxying(None, store, engines=engines, **GUARDED) as served:
        (shown,) = (await call(http, "GET", served.url + "/engines")).payload["engines"]

    assert (shown["healthy"], shown["ejected_until"] > 1.7e9) == (False, True)
    assert "dead is unreachable" in shown["last_fault"]


async def test_put_replaces_the_configured_endpoints_and_null_restores_them(store, http, engines):
    """Calls go to the new endpoints as soon as the response is sent."""
    configured, *replacements = engines
    async with proxying(configured.url, store, **GUARDED) as served:
        response = await put(
            http, served, *({"url": engine.url, "name": f"p{n}"} for n, engine in enumerate(replacements))
        )
        assert (
            response.status, [shown["name"] for shown in response.payload["engines"]], response.payload["configured"]
        ) == (200, ["p0", "p1"], False)  # fmt: skip
        assert {shown["kind"] for shown in response.payload["engines"]} == {"vllm"}
        assert {await chat(http, served, f"r{n}") for n in range(8)} == {200}
        assert [len(engine.requests) and True for engine in engines] == [0, True, True]

        response = await call(http, "PUT", served.url + "/engines", {"endpoints": None})
        assert (
            [engine["name"] for engine in response.payload["engines"]],
            response.payload["configured"],
        ) == (["fake"], True)
        assert await chat(http, served, "r1") == 200
    assert len(configured.requests) == 1


async def test_replaced_endpoints_apply_to_every_process_and_after_a_restart(store, http, engines):
    """A process applies them with its next call, and without calls within a second."""
    configured, first, second = engines
    async with proxying(configured.url, store, **GUARDED) as one, proxying(configured.url, store, **GUARDED) as other:
        await put(http, one, {"url": first.url})
        assert await chat(http, other, "r1") == 200
        assert [len(configured.requests), len(first.requests)] == [0, 1]

        await put(http, one, {"url": second.url})
        async with asyncio.timeout(50):
            while (await call(http, "GET", other.url + "/engines")).payload["engines"][0]["url"] != second.url:
                await asyncio.sleep(0.05)
    async with proxying(configured.url, store, **GUARDED) as later:
        assert await chat(http, later, "r2") == 200
    assert [len(engine.requests) for engine in engines] == [0, 1, 1]


async def test_calls_in_flight_complete_when_their_endpoint_is_kept_or_removed(store, http, engines):
    """A kept endpoint is not detected again, and still counts its calls in flight."""
    kept, removed, added = engines
    proceed = asyncio.Event()

    def holding(engine):
        played = engine.respond

        async def respond(request, body):
            if request.path != "/v1/models":
                await proceed.wait()
            return await played(request, body)

        engine.respond = respond

    holding(kept)
    holding(removed)
    endpoints = [{"url": kept.url, "name": "kept"}, {"url": removed.url, "name": "removed"}]
    async with proxying(None, store, engines={"endpoints": endpoints}, **GUARDED) as served:
        await call(http, "GET", served.url + "/engines")
        calls = [asyncio.create_task(chat(http, served, f"r{n}")) for n in range(12)]
        while len(kept.requests) + len(removed.requests) < 12:
            await asyncio.sleep(0.01)
        probes = kept.probes
        response = await put(http, served, {"url": kept.url, "name": "renamed"}, {"url": added.url, "name": "added"})
        shown = {engine["name"]: engine for engine in response.payload["engines"]}
        assert {"renamed", "added"} == set(shown)
        assert (len(kept.requests), probes) == (shown["renamed"]["in_flight"], kept.probes)
        proceed.set()
        assert set(await asyncio.gather(*calls)) == {200}
    steps = [step for n in range(12) for step in await stored_steps(store, f"r{n}")]
    assert (len(steps), all(step.exact for step in steps)) == (12, True)


async def test_metrics_of_removed_endpoints_are_dropped(store, http, engines):
    configured, *replacements = engines
    async with proxying(configured.url, store, **GUARDED) as served:
        for n in range(5):
            await put(http, served, {"url": replacements[n % 2].url, "name": f"pod-{n}"})
            assert await chat(http, served, f"r{n}") == 200
        text = (await call(http, "GET", served.url + "/metrics")).payload

    assert 'tokentape_calls_total{dialect="chat",engine="pod-4",status="200"} 1.0' in text
    assert 'tokentape_engine_healthy{engine="pod-4"} 1.0' in text
    assert all(f"pod-{n}" not in text for n in range(4))
    assert "fake" not in text


URL = "http://127.0.0.1:9"


async def test_an_invalid_list_of_endpoints_is_422_and_changes_nothing(store, http, engines):
    """The error names the field."""
    async with proxying(engines[0].url, store, **GUARDED) as served:
        for body, named in [
            ({}, "endpoints"),
            ({"endpoints": []}, "endpoints"),
            ({"endpoints": [{"name": "x"}]}, "endpoints.0.url"),
            ({"endpoints": [{"url": "file:///etc/passwd"}]}, "expected an http or https URL"),
            ({"endpoints": [{"url": URL, "kind": "tgi"}]}, "endpoints.0.kind"),
            ({"endpoints": [{"url": URL, "api_key": "a\r\nX: y"}]}, "endpoints.0.api_key"),
            ({"endpoints": [{"url": URL, "weight": 2}]}, "endpoints.0.weight"),
            ({"endpoints": [{"url": URL, "max_in_flight": 0}]}, "endpoints.0.max_in_flight"),
            (
                {"endpoints": [{"url": URL}, {"url": URL + "/v1", "name": "b"}]},
                "duplicate endpoint URL: http://127.0.0.1:9",
            ),
            (
                {"endpoints": [{"url": URL, "name": "a"}, {"url": "http://b", "name": "a"}]},
                "duplicate endpoint name: a",
            ),
        ]:
            response = await call(http, "PUT", served.url + "/engines", body)
            assert response.status == 422, body
            assert named in response.payload["error"]["message"]
            assert await chat(http, served, "r1") == 200


async def test_replacing_endpoints_requires_a_configured_control_key(store, http, engines):
    """Without configured control keys it is 403: agents could otherwise redirect calls."""
    configured, other, _ = engines
    sections = {**GUARDED, "agents": {"api_keys": ["agent"]}}
    async with proxying(configured.url, store, **sections) as served:
        for headers, status in (({}, 401), ({"Authorization": "Bearer agent"}, 403)):
            assert status == (await put(http, served, {"url": other.url}, headers=headers)).status
    async with proxying(configured.url, store) as served:
        response = await put(http, served, {"url": other.url})
        assert (response.status, "control.api_keys" in response.payload["error"]["message"]) == (403, True)

    assert (other.requests, other.probes) == ([], 0)


async def test_the_api_key_of_a_replaced_endpoint_is_stored_and_not_returned(store, http, engines):
    configured, other, _ = engines
    async with proxying(configured.url, store, **GUARDED) as served:
        response = await put(http, served, {"url": other.url, "api_key": "planted"})
        assert "planted" not in str(response.payload)
    async with proxying(configured.url, store, **GUARDED) as served:
        await chat(http, served, "r1")

    assert other.headers[-1]["authorization"] == "Bearer planted"


async def test_the_tokenizer_of_a_replaced_endpoint_is_used(store, http, engines, tmp_path):
    """The error names its folder."""
    configured, other, _ = engines
    path = str(tmp_path / "nothing")
    async with proxying(configured.url, store, **GUARDED) as served:
        await put(http, served, {"url": other.url, "tokenizer": path})
        headers = {"X-Reply-Tokens": "pieces"}
        response = await call(http, "POST", served.url + "/rollouts/r1/v1/chat/completions", BODY, headers)

    assert (response.status, path in response.payload["error"]["message"]) == (422, True)
