"""The engines: how they stand, and which ones there are."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes import fake_engine, proxying
from recorded import load
from stored import stored_steps

WHOLE = load("chat_ids_lp")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEY = {"Authorization": "Bearer control"}
GUARDED = {"control": {"api_keys": ["control"]}}


async def call(http, method, url, body=None, headers=KEY):
    async with http.request(method, url, json=body, headers=headers) as response:
        told = await response.json() if response.content_type == "application/json" else await response.text()
        return SimpleNamespace(status=response.status, told=told)


async def put(http, served, *endpoints, **said):
    return await call(http, "PUT", served.url + "/engines", {"endpoints": list(endpoints)}, **said)


@pytest.fixture
async def engines():
    """Three engines that answer every call."""
    async with fake_engine() as one, fake_engine() as other, fake_engine() as third:
        for engine in (one, other, third):
            engine.plays(WHOLE)
        yield one, other, third


async def chat(http, served, rollout):
    return (await call(http, "POST", f"{served.url}/rollouts/{rollout}/v1/chat/completions", BODY, {})).status


async def test_engines_are_shown_with_version_and_faults(store, http):
    """What an operator wants to know first; keys are not shown."""
    async with fake_engine() as engine, proxying(engine.url, store) as served:
        told = (await call(http, "GET", served.url + "/engines", headers={})).told
    (shown,) = told["engines"]

    assert told["configured"]
    assert ("fake", engine.url, "vllm", "0.32.0", True, 0, 0, 0, None, None) == tuple(
        shown[name]
        for name in (
            "name", "url", "kind", "version", "healthy", "faults", "in_flight", "queued", "ejected_until", "last_fault"
        )
    )  # fmt: skip
    assert "api_key" not in shown
    assert {"chat": "live", "completions": "live"} == shown["streams"]
    assert any("include_reasoning" in loss for loss in shown["loses"])


async def test_an_ejected_endpoint_is_shown_with_its_time_and_its_fault(store, http):
    """Until when it is passed over, and what it was that failed."""
    engines = {
        "endpoints": [{"url": "http://127.0.0.1:9", "name": "dead"}],
        "base_ejection_s": 600,
        "max_ejection_s": 600,
    }
    async with proxying(None, store, engines=engines, **GUARDED) as served:
        (shown,) = (await call(http, "GET", served.url + "/engines")).told["engines"]

    assert (False, True) == (shown["healthy"], shown["ejected_until"] > 1.7e9)
    assert "dead is unreachable" in shown["last_fault"]


async def test_endpoints_are_put_in_the_place_of_the_configured_ones(store, http, engines):
    """Calls go to the new ones from the answer on, and with null to the configured ones again."""
    configured, *others = engines
    async with proxying(configured.url, store, **GUARDED) as served:
        response = await put(http, served, *({"url": engine.url, "name": f"p{n}"} for n, engine in enumerate(others)))
        assert (200, ["p0", "p1"], False) == (
            response.status, [shown["name"] for shown in response.told["engines"]], response.told["configured"]
        )  # fmt: skip
        assert {"vllm"} == {shown["kind"] for shown in response.told["engines"]}
        assert {200} == {await chat(http, served, f"r{n}") for n in range(8)}
        assert [0, True, True] == [len(engine.requests) and True for engine in engines]

        response = await call(http, "PUT", served.url + "/engines", {"endpoints": None})
        assert (["fake"], True) == ([one["name"] for one in response.told["engines"]], response.told["configured"])
        assert 200 == await chat(http, served, "r1")
    assert 1 == len(configured.requests)


async def test_every_process_learns_of_it_and_so_does_one_that_starts_later(store, http, engines):
    """With its next call at once, without any within a second; a restart changes nothing."""
    configured, first, second = engines
    async with proxying(configured.url, store, **GUARDED) as here, proxying(configured.url, store, **GUARDED) as there:
        await put(http, here, {"url": first.url})
        assert 200 == await chat(http, there, "r1")
        assert [0, 1] == [len(configured.requests), len(first.requests)]

        await put(http, here, {"url": second.url})
        async with asyncio.timeout(50):
            while (await call(http, "GET", there.url + "/engines")).told["engines"][0]["url"] != second.url:
                await asyncio.sleep(0.05)
    async with proxying(configured.url, store, **GUARDED) as later:
        assert 200 == await chat(http, later, "r2")
    assert [0, 1, 1] == [len(engine.requests) for engine in engines]


async def test_an_endpoint_that_stays_keeps_its_calls_and_one_that_goes_ends_them(store, http, engines):
    """Both are answered; the one that stays is not asked again what it is, and shows its call in flight."""
    stays, goes, comes = engines
    go_on = asyncio.Event()

    def holding(engine):
        played = engine.respond

        async def respond(request, body):
            await go_on.wait()
            return await played(request, body)

        engine.respond = respond

    holding(stays)
    holding(goes)
    endpoints = [{"url": stays.url, "name": "stays"}, {"url": goes.url, "name": "goes"}]
    async with proxying(None, store, engines={"endpoints": endpoints}, **GUARDED) as served:
        await call(http, "GET", served.url + "/engines")
        calls = [asyncio.create_task(chat(http, served, f"r{n}")) for n in range(12)]
        while len(stays.requests) + len(goes.requests) < 12:
            await asyncio.sleep(0.01)
        asked = stays.probes
        response = await put(http, served, {"url": stays.url, "name": "renamed"}, {"url": comes.url, "name": "comes"})
        shown = {one["name"]: one for one in response.told["engines"]}
        assert {"renamed", "comes"} == set(shown)
        assert (len(stays.requests), asked) == (shown["renamed"]["in_flight"], stays.probes)
        go_on.set()
        assert {200} == set(await asyncio.gather(*calls))
    steps = [step for n in range(12) for step in await stored_steps(store, f"r{n}")]
    assert (12, True) == (len(steps), all(step.exact for step in steps))


async def test_metrics_forget_the_endpoints_that_went(store, http, engines):
    """However many come and go, there are as many of them as there are endpoints."""
    configured, *others = engines
    async with proxying(configured.url, store, **GUARDED) as served:
        for n in range(5):
            await put(http, served, {"url": others[n % 2].url, "name": f"pod-{n}"})
            assert 200 == await chat(http, served, f"r{n}")
        text = (await call(http, "GET", served.url + "/metrics")).told

    assert 'tokentape_calls_total{dialect="chat",engine="pod-4",status="200"} 1.0' in text
    assert 'tokentape_engine_healthy{engine="pod-4"} 1.0' in text
    assert all(f"pod-{n}" not in text for n in range(4))
    assert "fake" not in text


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("body", "named"),
    [
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
        ({"endpoints": [{"url": URL, "name": "a"}, {"url": "http://b", "name": "a"}]}, "duplicate endpoint name: a"),
    ],
)
async def test_what_is_no_list_of_endpoints_is_422(store, http, engines, body, named):
    """The refusal names the field, and nothing changes."""
    async with proxying(engines[0].url, store, **GUARDED) as served:
        response = await call(http, "PUT", served.url + "/engines", body)
        assert 422 == response.status
        assert named in response.told["error"]["message"]
        assert 200 == await chat(http, served, "r1")


async def test_endpoints_are_changed_with_a_control_key_only(store, http, engines):
    """Not without one, nor with an agent's, nor where none is configured: agents must not say where calls are sent."""
    configured, other, _ = engines
    said = {**GUARDED, "agents": {"api_keys": ["agent"]}}
    async with proxying(configured.url, store, **said) as served:
        for headers, status in (({}, 401), ({"Authorization": "Bearer agent"}, 403)):
            assert status == (await put(http, served, {"url": other.url}, headers=headers)).status
    async with proxying(configured.url, store) as served:
        response = await put(http, served, {"url": other.url})
        assert (403, True) == (response.status, "control.api_keys" in response.told["error"]["message"])

    assert ([], 0) == (other.requests, other.probes)


async def test_a_key_that_is_put_reaches_its_engine_after_a_restart_too(store, http, engines):
    """It is kept, and shown to nobody."""
    configured, other, _ = engines
    async with proxying(configured.url, store, **GUARDED) as served:
        response = await put(http, served, {"url": other.url, "api_key": "planted"})
        assert "planted" not in str(response.told)
    async with proxying(configured.url, store, **GUARDED) as served:
        await chat(http, served, "r1")

    assert "Bearer planted" == other.headers[-1]["authorization"]


async def test_an_endpoint_that_is_put_brings_its_tokenizer(store, http, engines, tmp_path):
    """As a configured one does: what it is missing is told of the new folder."""
    configured, other, _ = engines
    path = str(tmp_path / "nothing")
    async with proxying(configured.url, store, **GUARDED) as served:
        await put(http, served, {"url": other.url, "tokenizer": path})
        headers = {"X-Reply-Tokens": "pieces"}
        response = await call(http, "POST", served.url + "/rollouts/r1/v1/chat/completions", BODY, headers)

    assert (422, True) == (response.status, path in response.told["error"]["message"])
