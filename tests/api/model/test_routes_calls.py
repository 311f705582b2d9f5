"""Acceptance of calls: rollout IDs, limits, sampling rules, and requests that are rejected before anything is sent."""

import asyncio
import gzip
import json
from collections import Counter
from urllib.parse import unquote

import orjson
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fakes import fake_engine
from tests.support.recorded import load
from tests.support.session import BODY, CHAT, chat_path, one_call, session_with
from tests.support.stored import stored_rollout, stored_steps
from yarl import URL

from proxy.rollouts.rollout import write_fields

WHOLE = load("chat_ids_lp")
UNNAMED = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def cassette(engine):
    """The engine responds to all requests with one completion."""
    engine.plays(WHOLE)


@pytest.fixture
async def session(engine, store):
    """A client of a proxy with the default settings."""
    async with session_with(engine, store) as session:
        yield session


SOURCES = {
    "path": ("/rollouts/r%2F1/v1/chat/completions", {}, {}),
    "sessions path": ("/sessions/r%2F1/v1/chat/completions", {}, {}),
    "header": (UNNAMED, {"X-Rollout-Id": "r/1"}, {}),
    "key": (UNNAMED, {"Authorization": "Bearer rollout:r/1"}, {}),
    "x-api-key": (UNNAMED, {"X-Api-Key": "rollout:r/1"}, {}),
    "body": (UNNAMED, {}, {"rollout_id": "r/1"}),
    "metadata": (UNNAMED, {}, {"metadata": {"rollout_id": "r/1", "mine": 1}}),
}


@pytest.mark.parametrize("source", SOURCES)
async def test_a_call_can_name_its_rollout_in_the_path_a_header_the_key_or_the_body(store, engine, session, source):
    """The engine does not get the field `rollout_id`."""
    path, headers, fields = SOURCES[source]
    response = await session.post(path, BODY | fields, headers=headers)

    assert (response.status, response.headers["X-Rollout-Id"]) == (200, "r/1")
    assert len(await stored_steps(store, "r/1")) == 1
    assert "rollout_id" not in engine.requests[0]
    assert fields.get("metadata") == engine.requests[0].get("metadata")


async def test_an_engine_gets_its_headers_and_the_session_of_the_call(store, engine):
    """All calls of a rollout have one session; requests that belong to no call have the headers, too."""
    seen = []

    async def respond(request, body):
        seen.append((request.path, request.headers.get("X-Tenant"), request.headers.get("X-SMG-Routing-Key")))
        return web.Response(body=WHOLE.response, content_type="application/json")

    engine.respond = respond
    endpoint = {"url": engine.url, "headers": {"X-Tenant": "ours"}, "session": {"router": "sgl-router"}}
    async with session_with(None, store, engines={"endpoints": [endpoint]}) as session:
        for rollout in ("r1", "r1", "r2"):
            await session.post(chat_path(rollout), BODY)

    calls = [key for path, _, key in seen if path == UNNAMED]
    assert {tenant for _, tenant, _ in seen} == {"ours"}
    assert None is not calls[0] == calls[1] != calls[2]


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


async def test_calls_that_differ_in_one_field_are_planned_apart(store, engine, session):
    """A call reuses the plan of an earlier call, of any rollout, if only their prompts differ."""
    texts = [orjson.dumps(BODY | fields) for fields in ALMOST_EQUAL]
    texts.append(b'{"n": 2, "messages": [], "n": 1}')
    for rollout in ("r1", "r1", "r2"):
        for text in texts:
            await session.call("POST", chat_path(rollout), data=text)
    steps = [*await stored_steps(store, "r1"), *await stored_steps(store, "r2")]

    added, read = {"return_token_ids": True, "logprobs": True}, list(map(orjson.loads, texts)) * 3
    assert [orjson.dumps(body | added) for body in read] == list(map(orjson.dumps, engine.requests))
    assert list(map(orjson.dumps, read)) == [orjson.dumps(step.request) for step in steps]
    assert repr([(body.get("temperature"), sorted(added.keys() - body.keys())) for body in read]) == repr(
        [(step.sampling.get("temperature"), sorted(step.sent["set"])) for step in steps]
    )


async def test_a_call_with_other_terms_is_planned_apart(engine, session):
    """The rollout sets the terms: sampling rules, model and tools."""
    rules = [{"sampling": {"override": {"top_p": value}}} for value in (1, 1.0)]
    for number, fields in enumerate([{}, {"model": "other"}, *rules]):
        await session.open(f"r{number}", **fields)
    for number in [*range(4)] * 2:
        await session.post(chat_path(f"r{number}"), BODY)

    sent = [orjson.dumps([request["model"], request.get("top_p")]) for request in engine.requests]
    assert sent == [b'["tiny",null]', b'["other",null]', b'["tiny",1]', b'["tiny",1.0]'] * 2


async def test_by_default_each_unnamed_call_gets_a_new_rollout(store, session):
    first, second = [(await session.post(UNNAMED, BODY)).headers["X-Rollout-Id"] for _ in range(2)]

    assert first != second
    assert len(await stored_steps(store, first)) == 1


async def test_unnamed_calls_go_to_the_endpoint_with_the_fewest_calls_in_flight(store):
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
        async with session_with(None, store, engines={"endpoints": endpoints}) as session:
            responses = await asyncio.gather(*(session.post(UNNAMED, BODY) for _ in range(30)))
            assert [len(engine.requests) for engine in (first, second, third)] == [10, 10, 10]
            await asyncio.gather(*(session.post(UNNAMED, BODY, headers={"X-Rollout-Id": "r"}) for _ in range(30)))

    assert {response.status for response in responses} == {200}
    assert sorted(len(engine.requests) for engine in (first, second, third)) == [10, 10, 40]


async def test_with_unnamed_rollouts_reject_an_unnamed_call_is_400(store, engine):
    """The error names the parameter."""
    async with session_with(engine, store, agents={"unnamed_rollouts": "reject"}) as session:
        response = await session.post(UNNAMED, BODY)

    assert (response.status, response.json["error"]["param"]) == (400, "rollout_id")
    assert engine.requests == []


async def test_with_unnamed_rollouts_pass_an_unnamed_call_is_forwarded_unchanged_and_unrecorded(store, engine):
    async with session_with(engine, store, agents={"unnamed_rollouts": "pass"}) as session:
        response = await session.post(UNNAMED, BODY)

    assert "X-Rollout-Id" not in response.headers
    assert engine.requests == [BODY]


HOSTILE = ["%7B%7D", "{}", "..%2F..%2Fetc", "a%3Ab%3A*", "%F0%9F%A6%8A", "x" * 256, "%20", "a%25b", "%22%5C"]
INVALID = ["x" * 257, "%0A", "%00", "a%0D%0AX-Evil:1", "%FF", "%ED%A0%80", ""]


async def call_encoded(session, segment):
    """Make a call of the rollout whose ID has these encoded characters."""
    async with session.http.post(URL(session.url + chat_path(segment), encoded=True), json=BODY) as response:
        return response.status, await response.json()


async def test_any_printable_text_is_a_valid_rollout_id(store, session):
    """IDs may contain braces, dots, colons, spaces and emoji, and up to 256 characters."""
    for segment in HOSTILE:
        assert (await call_encoded(session, segment))[0] == 200, segment

    expected = Counter(map(unquote, HOSTILE))
    assert expected.keys() == {*(await store.list()).names}
    assert {name: len(await stored_steps(store, name)) for name in expected} == expected


async def test_an_invalid_rollout_id_is_400_in_the_dialects_error_shape(store, engine, session):
    """Nothing is sent or stored."""
    for segment in INVALID:
        status, error = await call_encoded(session, segment)
        assert (status, error["error"]["type"]) == (400, "invalid_request_error"), segment

    assert ((await store.list()).names, engine.requests) == ((), [])


async def test_a_call_of_a_finished_rollout_is_409(store, engine, session):
    await store.open("r1", write_fields({"status": "completed"}), now_ms=1)
    response = await session.post(CHAT, BODY)

    assert (response.status, response.json["error"]["type"], engine.requests) == (409, "rollout_closed", [])


@pytest.mark.parametrize("limits", [{"max_steps": 2}, {"max_tokens": 30}])
async def test_a_call_past_a_limit_is_429_and_sets_the_status_limited(store, session, limits):
    """X-Should-Retry prevents retries by OpenAI's clients."""
    await session.open("r1", limits=limits)
    responses = [await session.post(CHAT, BODY) for _ in range(4)]

    assert [response.status for response in responses] == [200, 200, 429, 429]
    assert responses[2].headers["X-Should-Retry"] == "false"
    assert (await stored_rollout(store, "r1")).status == "limited"


async def test_a_model_alias_is_replaced_in_the_request_and_restored_in_the_response(store, engine):
    response, _ = await one_call(engine, store, BODY | {"model": "gpt-4o"}, models={"gpt-4o": "tiny"})

    assert (engine.requests[0]["model"], response.json["model"]) == ("tiny", "gpt-4o")


async def test_sampling_rules_of_the_configuration_and_the_rollout_are_applied_and_recorded(store, engine):
    """Overrides replace the client's value, defaults do not; the rollout's rules have priority."""
    await store.open("r1", write_fields({"sampling": {"override": {"temperature": 1.0}}}), now_ms=1)
    rules = {"override": {"temperature": 0.5, "seed": 3}, "default": {"top_p": 0.9}, "cap": {"max_tokens": 10}}
    _, step = await one_call(engine, store, BODY | {"temperature": 0.1, "max_tokens": 99}, sampling=rules)

    expected = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "max_tokens": 10}
    assert {name: engine.requests[0][name] for name in expected} == expected
    assert expected.items() <= step.sampling.items()
    assert step.request["temperature"] == 0.1


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


async def test_a_malformed_body_is_400_in_openais_error_shape(store, engine, session):
    """It is not recorded."""
    for name, body in BAD.items():
        response = await session.call("POST", UNNAMED, data=body)
        assert (response.status, response.json["error"]["type"]) == (400, "invalid_request_error"), name
        assert response.json["error"].keys() == {"message", "type", "param", "code"}

    assert ((await store.list()).names, engine.requests) == ((), [])


async def test_the_last_of_duplicate_keys_is_used(engine, session):
    """Engines do the same."""
    await session.call("POST", UNNAMED, data=b'{"model":"a","messages":[],"model":"b"}')

    assert engine.requests[0]["model"] == "b"


async def test_a_body_that_is_not_gzip_as_declared_is_400_and_names_gzip(session):
    response = await session.call("POST", UNNAMED, data=b"not gzip", headers={"Content-Encoding": "gzip"})

    assert response.status == 400
    assert "gzip" in response.json["error"]["message"]


@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_above_the_size_limit_is_413(store, engine, packed):
    """The limit applies to the decompressed body."""
    text = orjson.dumps(BODY | {"pad": "x" * 200_000})
    sent = {"data": gzip.compress(text), "headers": {"Content-Encoding": "gzip"}} if packed else {"data": text}
    async with session_with(engine, store, agents={"max_body_bytes": 100_000}) as session:
        response = await session.call("POST", UNNAMED, **sent)

    assert (response.status, response.json["error"]["type"]) == (413, "request_too_large")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "n", "stream", "logprobs", "top_logprobs", "return_token_ids", "rollout_id", "metadata",
     "stream_options", "echo", "max_tokens", "include_reasoning", "stop", "x"]
)  # fmt: skip


async def test_random_bodies_are_accepted_or_rejected_as_invalid(store, session):
    """The statuses are 200, 400 and 422 (Osmosis' flat form); the store remains readable."""
    drawn: list[tuple[str, bytes]] = []

    @settings(database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        st.sampled_from([UNNAMED, "/v1/completions"]),
        st.dictionaries(FIELDS, JSON, max_size=6).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60),
    )
    def draw(path, text):
        drawn.append((path, text))

    draw()  # first, since the examples of hypothesis run in a synchronous function
    for path, text in drawn:
        response = await session.call("POST", path, data=text)
        assert response.status in (200, 400, 422), (path, text, response.text)
    assert (await session.post(UNNAMED, BODY)).status == 200
    for name in (await store.list(limit=1000)).names:
        await stored_steps(store, name)


async def test_a_call_is_sent_to_an_endpoint_that_serves_its_model(store, engine):
    """By its name at the engine: after the configured aliases, or the model of its rollout."""
    async with fake_engine() as other:
        other.plays(WHOLE)
        endpoints = [
            {"url": engine.url, "name": "one", "models": ["policy", "tiny"]},
            {"url": other.url, "name": "two", "models": ["judge-*"]},
        ]
        aliases = {"gpt-4o": "policy", "claude-*": "judge-7b"}
        async with session_with(None, store, engines={"endpoints": endpoints}, models=aliases) as session:
            await session.open("judged", model="judge-1")
            named = {"a": "policy", "b": "judge-7b", "c": "gpt-4o", "d": "claude-3", "judged": "x"}
            for rollout, model in named.items():
                assert (await session.post(chat_path(rollout), {**BODY, "model": model})).status == 200

    assert [body["model"] for body in engine.requests] == ["policy", "policy"]
    assert [body["model"] for body in other.requests] == ["judge-7b", "judge-7b", "judge-1"]


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        (UNNAMED, {"messages": BODY["messages"]}, {"param": "model"}),
        ("/v1/completions", {"prompt": "x"}, {"param": "model"}),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 5}, {"type": "not_found_error"}),
        ("/v1/responses", {"input": "x"}, {"param": "model"}),
    ],
)
async def test_a_model_that_no_endpoint_serves_is_404_in_the_dialects_shape(store, engine, path, fields, error):
    """Nothing is sent or recorded."""
    async with session_with(None, store, engines={"endpoints": [{"url": engine.url, "models": ["policy"]}]}) as session:
        response = await session.post(f"/rollouts/r1{path}", {"model": "other", **fields})

    assert response.status == 404
    assert "'other' does not exist" in response.json["error"]["message"]
    assert error.items() <= response.json["error"].items()
    assert (engine.requests, await stored_steps(store, "r1")) == ([], [])
