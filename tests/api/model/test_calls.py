"""Acceptance of calls: rollout IDs, limits, sampling rules, and requests that are rejected before anything is sent."""

import asyncio
import gzip
from collections import Counter

import orjson
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fakes import fake_engine, proxying
from tests.support.recorded import load
from tests.support.stored import stored_rollout, stored_steps

from proxy.rollouts.rollout import write_fields

WHOLE = load("chat_ids_lp")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def cassette(engine):
    """The engine responds to all requests with one completion."""
    engine.plays(WHOLE)


async def post(http, url, **named):
    async with http.post(url, **named) as response:
        return response, orjson.loads(await response.read())


SOURCES = {
    "path": ("/rollouts/r%2F1/v1/chat/completions", {}, {}),
    "sessions path": ("/sessions/r%2F1/v1/chat/completions", {}, {}),
    "header": ("/v1/chat/completions", {"X-Rollout-Id": "r/1"}, {}),
    "key": ("/v1/chat/completions", {"Authorization": "Bearer rollout:r/1"}, {}),
    "x-api-key": ("/v1/chat/completions", {"X-Api-Key": "rollout:r/1"}, {}),
    "body": ("/v1/chat/completions", {}, {"rollout_id": "r/1"}),
    "metadata": ("/v1/chat/completions", {}, {"metadata": {"rollout_id": "r/1", "mine": 1}}),
}


@pytest.mark.parametrize("source", SOURCES)
async def test_a_call_can_name_its_rollout_in_the_path_a_header_the_key_or_the_body(store, engine, http, source):
    """The engine does not get the field `rollout_id`."""
    path, headers, fields = SOURCES[source]
    async with proxying(engine.url, store) as served:
        response, _ = await post(http, served.url + path, json=BODY | fields, headers=headers)

    assert (200, "r/1") == (response.status, response.headers["X-Rollout-Id"])
    assert 1 == len(await stored_steps(store, "r/1"))
    assert "rollout_id" not in engine.requests[0]
    assert fields.get("metadata") == engine.requests[0].get("metadata")


async def test_an_engine_gets_its_headers_and_the_session_of_the_call(store, engine, http):
    """All calls of a rollout have one session; requests that belong to no call have the headers, too."""
    seen = []

    async def respond(request, body):
        seen.append((request.path, request.headers.get("X-Tenant"), request.headers.get("X-SMG-Routing-Key")))
        return web.Response(body=WHOLE.response, content_type="application/json")

    engine.respond = respond
    endpoint = {"url": engine.url, "headers": {"X-Tenant": "ours"}, "session": {"router": "sgl-router"}}
    async with proxying(engine.url, store, engines={"endpoints": [endpoint]}) as served:
        for rollout in ("r1", "r1", "r2"):
            await post(http, f"{served.url}/rollouts/{rollout}/v1/chat/completions", json=BODY)

    calls = [(tenant, session) for path, tenant, session in seen if path == "/v1/chat/completions"]
    assert {"ours"} == {tenant for _, tenant, _ in seen}
    assert calls[0] == calls[1] != calls[2]
    assert None is not calls[0][1]


ALMOST_EQUAL = [
    {"temperature": 1},
    {"temperature": 1.0},
    {"temperature": True},
    {"temperature": 1, "seed": 3},
    {"seed": 3, "temperature": 1},
    {"logprobs": True},
    {"logprobs": 1},
    {"n": 2},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
]


async def test_calls_that_differ_in_one_field_are_planned_apart(store, engine, http):
    """A call reuses the plan of an earlier call, of any rollout, if only their prompts differ."""
    texts = [orjson.dumps(BODY | fields) for fields in ALMOST_EQUAL]
    texts.append(b'{"n": 2, "messages": [], "n": 1}')
    async with proxying(engine.url, store) as served:
        for rollout in ("r1", "r1", "r2"):
            for text in texts:
                async with http.post(f"{served.url}/rollouts/{rollout}/v1/chat/completions", data=text) as response:
                    await response.read()
    steps = [await stored_steps(store, rollout) for rollout in ("r1", "r2")]

    added = {"return_token_ids": True, "logprobs": True}
    expected = [orjson.dumps(orjson.loads(text) | added) for text in texts]
    assert expected * 3 == [orjson.dumps(request) for request in engine.requests]
    assert [[orjson.dumps(orjson.loads(text)) for text in texts * count] for count in (2, 1)] == [
        [orjson.dumps(step.request) for step in found] for found in steps
    ]
    recorded = [(step.sampling.get("temperature"), step.sent["set"].keys()) for step in (*steps[0], *steps[1])]
    read = [orjson.loads(text) for text in texts] * 3
    assert repr([(body.get("temperature"), sorted(added.keys() - body.keys())) for body in read]) == repr(
        [(temperature, sorted(names)) for temperature, names in recorded]
    )


async def test_a_call_with_other_terms_is_planned_apart(store, engine, http):
    """The rollout sets the terms: sampling rules, model and tools."""
    terms = [
        {},
        {"model": "other"},
        {"sampling": {"override": {"top_p": 1}}},
        {"sampling": {"override": {"top_p": 1.0}}},
    ]
    async with proxying(engine.url, store) as served:
        for number, fields in enumerate(terms):
            await post(http, f"{served.url}/rollouts", json={"rollout_id": f"r{number}"} | fields)
        for _ in range(2):
            for number in range(len(terms)):
                await post(http, f"{served.url}/rollouts/r{number}/v1/chat/completions", json=BODY)

    sent = [orjson.dumps({name: request.get(name) for name in ("model", "top_p")}) for request in engine.requests]
    expected = [
        {"model": name, "top_p": top_p} for name, top_p in (("tiny", None), ("other", None), ("tiny", 1), ("tiny", 1.0))
    ]
    assert list(map(orjson.dumps, expected)) * 2 == sent


async def test_by_default_each_unnamed_call_gets_a_new_rollout(store, engine, http):
    async with proxying(engine.url, store) as served:
        first, _ = await post(http, served.url + "/v1/chat/completions", json=BODY)
        second, _ = await post(http, served.url + "/v1/chat/completions", json=BODY)

    assert first.headers["X-Rollout-Id"] != second.headers["X-Rollout-Id"]
    assert 1 == len(await stored_steps(store, first.headers["X-Rollout-Id"]))


async def test_unnamed_calls_go_to_the_endpoint_with_the_fewest_calls_in_flight(store, http):
    """Calls of one rollout go to one endpoint."""
    all_here = asyncio.Event()
    held = []

    async def respond(request, body):
        if request.path == "/v1/models":  # the first calls wait for it
            return web.json_response({"data": []})
        held.append(body)
        if len(held) == 30:
            all_here.set()
        await all_here.wait()
        return web.Response(body=WHOLE.response, content_type="application/json")

    async with fake_engine() as first, fake_engine() as second, fake_engine() as third:
        for engine in (first, second, third):
            engine.respond = respond
        endpoints = [{"url": engine.url, "kind": "vllm"} for engine in (first, second, third)]
        async with proxying(None, store, engines={"endpoints": endpoints}) as served:
            url = served.url + "/v1/chat/completions"
            responses = await asyncio.gather(*(post(http, url, json=BODY) for _ in range(30)))
            assert [10, 10, 10] == [len(engine.requests) for engine in (first, second, third)]
            await asyncio.gather(*(post(http, url, json=BODY, headers={"X-Rollout-Id": "r"}) for _ in range(30)))

    assert {200} == {response.status for response, _ in responses}
    assert [10, 10, 40] == sorted(len(engine.requests) for engine in (first, second, third))


async def test_with_unnamed_rollouts_reject_an_unnamed_call_is_400(store, engine, http):
    """The error names the parameter."""
    async with proxying(engine.url, store, agents={"unnamed_rollouts": "reject"}) as served:
        response, error = await post(http, served.url + "/v1/chat/completions", json=BODY)

    assert (400, "rollout_id") == (response.status, error["error"]["param"])
    assert [] == engine.requests


async def test_with_unnamed_rollouts_pass_an_unnamed_call_is_forwarded_unchanged_and_unrecorded(store, engine, http):
    async with proxying(engine.url, store, agents={"unnamed_rollouts": "pass"}) as served:
        response, _ = await post(http, served.url + "/v1/chat/completions", json=BODY)

    assert "X-Rollout-Id" not in response.headers
    assert [BODY] == engine.requests


HOSTILE = ["%7B%7D", "{}", "..%2F..%2Fetc", "a%3Ab%3A*", "%F0%9F%A6%8A", "x" * 256, "%20", "a%25b", "%22%5C"]


async def test_any_printable_text_is_a_valid_rollout_id(store, engine, http):
    """IDs may contain braces, dots, colons, spaces and emoji, and up to 256 characters."""
    from urllib.parse import unquote

    from yarl import URL

    async with proxying(engine.url, store) as served:
        for segment in HOSTILE:
            url = URL(f"{served.url}/rollouts/{segment}/v1/chat/completions", encoded=True)
            response, _ = await post(http, url, json=BODY)
            assert 200 == response.status, segment

    expected = Counter(map(unquote, HOSTILE))
    assert expected.keys() == {*(await store.list()).names}
    assert expected == {name: len(await stored_steps(store, name)) for name in expected}


async def test_an_invalid_rollout_id_is_400_in_the_dialects_error_shape(store, engine, http):
    """Nothing is sent or stored."""
    from yarl import URL

    async with proxying(engine.url, store) as served:
        for segment in ["x" * 257, "%0A", "%00", "a%0D%0AX-Evil:1", "%FF", "%ED%A0%80", ""]:
            url = URL(f"{served.url}/rollouts/{segment}/v1/chat/completions", encoded=True)
            response, error = await post(http, url, json=BODY)
            assert (400, "invalid_request_error") == (response.status, error["error"]["type"]), segment

    assert ((), []) == ((await store.list()).names, engine.requests)


class TestGuards:
    """Calls that a rollout does not accept."""

    async def test_a_call_of_a_finished_rollout_is_409(self, store, engine, http):
        await store.open("r1", write_fields({"status": "completed"}), now_ms=1)
        async with proxying(engine.url, store) as served:
            response, error = await post(http, served.url + "/rollouts/r1/v1/chat/completions", json=BODY)

        assert (409, "rollout_closed", []) == (response.status, error["error"]["type"], engine.requests)

    @pytest.mark.parametrize("limits", [{"max_steps": 2}, {"max_tokens": 30}])
    async def test_a_call_past_a_limit_is_429_and_sets_the_status_limited(self, store, engine, http, limits):
        """X-Should-Retry prevents retries by OpenAI's clients."""
        await store.open("r1", write_fields({"limits": limits}), now_ms=1)
        async with proxying(engine.url, store) as served:
            responses = [
                (await post(http, served.url + "/rollouts/r1/v1/chat/completions", json=BODY))[0] for _ in range(4)
            ]

        assert [200, 200, 429, 429] == [response.status for response in responses]
        assert "false" == responses[2].headers["X-Should-Retry"]
        assert "limited" == (await stored_rollout(store, "r1")).status


class TestTerms:
    """Values that replace the client's."""

    async def test_a_model_alias_is_replaced_in_the_request_and_restored_in_the_response(self, store, engine, http):
        async with proxying(engine.url, store, models={"gpt-4o": "tiny"}) as served:
            _, shown = await post(http, served.url + "/v1/chat/completions", json=BODY | {"model": "gpt-4o"})

        assert ("tiny", "gpt-4o") == (engine.requests[0]["model"], shown["model"])

    async def test_sampling_rules_of_the_configuration_and_the_rollout_are_applied_and_recorded(
        self, store, engine, http
    ):
        """Overrides replace the client's value, defaults do not; the rollout's rules have priority."""
        await store.open("r1", write_fields({"sampling": {"override": {"temperature": 1.0}}}), now_ms=1)
        rules = {"override": {"temperature": 0.5, "seed": 3}, "default": {"top_p": 0.9}, "cap": {"max_tokens": 10}}
        async with proxying(engine.url, store, sampling=rules) as served:
            await post(
                http,
                served.url + "/rollouts/r1/v1/chat/completions",
                json=BODY | {"temperature": 0.1, "max_tokens": 99},
            )

        (step,) = await stored_steps(store, "r1")
        expected = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "max_tokens": 10}
        assert expected == {name: engine.requests[0][name] for name in expected}
        assert expected.items() <= step.sampling.items()
        assert 0.1 == step.request["temperature"]


class TestBadInput:
    """Invalid requests get an error with the right status and shape, and are not recorded."""

    BAD = {
        "malformed": b'{"messages": [',
        "empty": b"",
        "a list": b"[1]",
        "null": b"null",
        "invalid UTF-8": b'{"a": "\xff"}',
        "deep": b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        "less deep": b'{"a":' + b"[" * 250 + b"]" * 250 + b"}",
        "NaN": b'{"temperature": NaN}',
        "a huge integer": b'{"seed": 123456789012345678901234567890}',
        "a lone surrogate": b'{"a": "\\ud800"}',
        "a rollout id that is a number": b'{"rollout_id": 7}',
    }

    async def test_a_malformed_body_is_400_in_openais_error_shape(self, store, engine, http):
        async with proxying(engine.url, store) as served:
            for name, body in self.BAD.items():
                response, error = await post(http, served.url + "/v1/chat/completions", data=body)
                assert (400, "invalid_request_error") == (response.status, error["error"]["type"]), name
                assert {"message", "type", "param", "code"} == error["error"].keys()

        assert ((), []) == ((await store.list()).names, engine.requests)

    async def test_the_last_of_duplicate_keys_is_used(self, store, engine, http):
        """Engines do the same."""
        text = b'{"model":"a","messages":[],"model":"b"}'
        async with proxying(engine.url, store) as served:
            await post(http, served.url + "/v1/chat/completions", data=text)

        assert "b" == engine.requests[0]["model"]

    async def test_a_body_that_is_not_gzip_as_declared_is_400_and_names_gzip(self, store, engine, http):
        async with proxying(engine.url, store) as served:
            response, error = await post(
                http, served.url + "/v1/chat/completions", data=b"not gzip", headers={"Content-Encoding": "gzip"}
            )

        assert 400 == response.status
        assert "gzip" in error["error"]["message"]

    @pytest.mark.parametrize("packed", [False, True])
    async def test_a_body_above_the_size_limit_is_413(self, store, engine, http, packed):
        """The limit applies to the decompressed body."""
        text = orjson.dumps(BODY | {"pad": "x" * 200_000})
        headers = {"Content-Encoding": "gzip"} if packed else {}
        async with proxying(engine.url, store, agents={"max_body_bytes": 100_000}) as served:
            response, error = await post(
                http, served.url + "/v1/chat/completions", data=gzip.compress(text) if packed else text, headers=headers
            )

        assert (413, "request_too_large") == (response.status, error["error"]["type"])

    @pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/realtime", "/nothing", "/rollouts/r1/v1/images"])
    async def test_an_unknown_route_is_404_and_not_forwarded(self, store, engine, http, path):
        async with proxying(engine.url, store) as served:
            response, error = await post(http, served.url + path, json=BODY)

        assert (404, "not_found_error", []) == (response.status, error["error"]["type"], engine.requests)

    async def test_random_bodies_are_accepted_or_rejected_as_invalid(self, store, engine, http):
        """The statuses are 200, 400 and 422 (Osmosis' flat form); the store remains readable."""
        async with proxying(engine.url, store) as served:
            await send_random_bodies(served.url, engine, http)
            assert 200 == (await post(http, served.url + "/v1/chat/completions", json=BODY))[0].status
        for name in (await store.list(limit=1000)).names:
            await stored_steps(store, name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "n", "stream", "logprobs", "top_logprobs", "return_token_ids", "rollout_id", "metadata",
     "stream_options", "echo", "max_tokens", "include_reasoning", "stop", "x"]
)  # fmt: skip


async def send_random_bodies(url, engine, http):
    """Send bodies drawn by hypothesis. They are drawn first, since its examples run in a synchronous function."""
    import json

    drawn: list[tuple[str, bytes]] = []

    @settings(database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
        st.dictionaries(FIELDS, JSON, max_size=6).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60),
    )
    def draw(path, text):
        drawn.append((path, text))

    draw()
    for path, text in drawn:
        async with http.post(url + path, data=text) as response:
            shown = await response.read()
            assert response.status in (200, 400, 422), (path, text, shown)


async def test_a_call_is_sent_to_an_endpoint_that_serves_its_model(store, engine, http):
    """By its name at the engine: after the configured aliases, or the model of its rollout."""
    async with fake_engine() as other:
        other.plays(WHOLE)
        endpoints = [
            {"url": engine.url, "name": "one", "models": ["policy", "tiny"]},
            {"url": other.url, "name": "two", "models": ["judge-*"]},
        ]
        aliases = {"gpt-4o": "policy", "claude-*": "judge-7b"}
        async with proxying(None, store, engines={"endpoints": endpoints}, models=aliases) as served:
            await post(http, served.url + "/rollouts", json={"rollout_id": "judged", "model": "judge-1"})
            for rollout, model in (
                ("a", "policy"),
                ("b", "judge-7b"),
                ("c", "gpt-4o"),
                ("d", "claude-3"),
                ("judged", "x"),
            ):
                url = f"{served.url}/rollouts/{rollout}/v1/chat/completions"
                response, _ = await post(http, url, json={**BODY, "model": model})
                assert 200 == response.status

    assert ["policy", "policy"] == [body["model"] for body in engine.requests]
    assert ["judge-7b", "judge-7b", "judge-1"] == [body["model"] for body in other.requests]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "param"),
        ("/v1/completions", "param"),
        ("/v1/messages", "type"),
        ("/v1/responses", "param"),
    ],
)
async def test_a_model_that_no_endpoint_serves_is_404_in_the_dialects_shape(store, engine, http, path, field):
    """Nothing is sent or recorded."""
    endpoints = [{"url": engine.url, "models": ["policy"]}]
    prompt = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(
        path, {"messages": BODY["messages"]}
    )
    body = {"model": "other", **prompt, **({"max_tokens": 5} if path == "/v1/messages" else {})}
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        response, shown = await post(http, f"{served.url}/rollouts/r1{path}", json=body)

    assert 404 == response.status
    assert "'other' does not exist" in shown["error"]["message"]
    assert {"param": "model", "type": "not_found_error"}[field] == shown["error"][field]
    assert [] == engine.requests
    assert [] == await stored_steps(store, "r1")
