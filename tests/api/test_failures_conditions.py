"""The status of each condition under which TokenTape refuses a call: the same in all dialects, in the format of each."""

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest
from tests.support.fakes import FailingStore, proxying
from tests.support.recorded import load

from proxy.api.api_keys import mint
from proxy.rollouts.rollout import write_fields

ID = "00000000-0000-8000-8000-000000000000"  # of a session of Atropos' proxy, which is a rollout for other paths
OTHER_ID = "00000000-0000-8000-8000-000000000001"
SECRET = b"s" * 32
MESSAGES = [{"role": "user", "content": "hi"}]
BASE = "/rollouts/{id}"
GEMINI = {"contents": [{"parts": [{"text": "hi"}]}]}
CALLS = {
    "chat": (f"{BASE}/v1/chat/completions", {"model": "m", "messages": MESSAGES}),
    "completions": (f"{BASE}/v1/completions", {"model": "m", "prompt": "hi"}),
    "generate": (f"{BASE}/inference/v1/generate", {"model": "m", "token_ids": [1], "sampling_params": {}}),
    "messages": (f"{BASE}/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 5}),
    "messages stream": (f"{BASE}/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 5, "stream": True}),
    "responses": (f"{BASE}/v1/responses", {"model": "m", "input": "hi"}),
    "gemini": (f"{BASE}/v1beta/models/m:generateContent", GEMINI),
    "gemini stream": (f"{BASE}/v1beta/models/m:streamGenerateContent?alt=sse", GEMINI),
    "gemini array": (f"{BASE}/v1beta/models/m:streamGenerateContent", GEMINI),
    "osmosis": (f"{BASE}/v1/completions", {"model": "default", "messages": MESSAGES}),
    "atropos": (f"{BASE}/generate", {"prompt": {"prompt_token_ids": [1]}}),
    "atropos session": ("/{id}/v1/chat/completions", {"messages": MESSAGES}),
}


@asynccontextmanager
async def opened(engine, store, *, terms=None, **sections):
    """Start a proxy with keys, and open the rollout."""
    settings = {"agents": {"api_keys": ["good"], **sections.pop("agents", {})}, "control": {"api_keys": ["control"]}}
    await store.set_once("minting-secret", SECRET)
    await store.open(ID, write_fields({"metadata": {"atropos": {}}, **(terms or {})}), now_ms=1)
    async with proxying(engine.url, store, atropos={"enabled": True}, **settings, **sections) as served:
        yield served


async def sent(http, served, call, *, key="good", data=None, **headers):
    """Return the status, the headers and the JSON of a call."""
    path, body = CALLS[call]
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = orjson.dumps(body) if data is None else data
    async with http.post(served.url + path.format(id=ID), data=data, headers=headers) as response:
        return response.status, response.headers, orjson.loads(await response.read())


def code_of(call, status, shown):
    """Return the code of an error, which has the format of the dialect; None if the format has no codes."""
    if call.startswith("messages"):
        assert shown.keys() == {"type", "error"}
        assert shown["error"].keys() == {"type", "message"}
        return None
    if call == "gemini array":
        (shown,) = shown
    error = shown["error"]
    if call.startswith("gemini"):
        assert (error["code"], type(error["status"])) == (status, str)
        return error["details"][0]["reason"].lower()
    if call == "atropos session":
        assert status == error["code"]
        return None
    assert error.keys() == {"message", "type", "param", "code"}
    return error["code"]


async def check(http, served, status, code, *, calls=tuple(CALLS), **options):
    """Each call has the status, the code of its format if it has codes, and the same headers about retries."""
    responses = {call: await sent(http, served, call, **options) for call in calls}
    codes = {call: code_of(call, found, shown) for call, (found, _, shown) in responses.items()}
    retries = {(headers.get("Retry-After"), headers.get("X-Should-Retry")) for _, headers, _ in responses.values()}

    assert dict.fromkeys(calls, status) == {call: found for call, (found, _, _) in responses.items()}
    assert set(codes.values()) - {None} == {code}
    assert len(retries) == 1, retries
    return retries.pop()


@pytest.mark.parametrize(
    ("terms", "status", "code", "retry"),
    [
        ({"status": "completed", "finished_ms": 2}, 409, "rollout_closed", (None, "false")),
        ({"status": "aborted", "reason": "surplus", "finished_ms": 2}, 409, "rollout_closed", (None, "false")),
        ({"status": "aborted", "reason": "deadline", "finished_ms": 2}, 409, "rollout_closed", (None, "false")),
        ({"deadline_s": 1}, 409, "rollout_closed", (None, "false")),
        ({"limits": {"max_steps": 0}}, 429, "rollout_limit", ("60", "false")),
        ({"limits": {"max_tokens": 0}}, 429, "rollout_limit", ("60", "false")),
    ],
    ids=["finished", "surplus", "aborted", "past its deadline", "max_steps", "max_tokens"],
)
async def test_the_state_of_a_rollout_has_one_status(store, engine, http, terms, status, code, retry):
    """With the header that keeps clients from repeating 409 and 429: neither changes."""
    async with opened(engine, store, terms=terms) as served:
        assert retry == await check(http, served, status, code)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("key", "status", "code"),
    [(None, 401, "invalid_api_key"), ("bad", 401, "invalid_api_key"), (OTHER_ID, 403, "forbidden")],
)
async def test_a_key_that_does_not_permit_a_call_has_one_status(store, engine, http, key, status, code):
    """The call has no key, an unknown key, or the key of another rollout."""
    async with opened(engine, store) as served:
        if key == OTHER_ID:
            other = await store.open(OTHER_ID, {}, now_ms=1)
            key = mint(OTHER_ID, other.incarnation, SECRET)
        assert await check(http, served, status, code, key=key) == (None, None)


async def test_the_key_of_a_deleted_rollout_has_one_status(store, engine, http):
    async with opened(engine, store) as served:
        stored = await store.get(ID)
        await store.delete(ID)
        await check(http, served, 401, "invalid_api_key", key=mint(ID, stored.incarnation, SECRET))


async def test_a_pause_has_one_status(store, engine, http):
    async with opened(engine, store) as served:
        control = {"Authorization": "Bearer control"}
        async with http.post(served.url + "/policy/pause", json={"mode": "reject"}, headers=control) as paused:
            assert paused.status == 200
        assert await check(http, served, 429, "paused") == ("1", None)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("overloaded", {"agents": {"max_bytes_in_flight": 1000}}),
        ("engine_busy", {"engines": {"max_queued": 0}}),
    ],
)
async def test_a_full_proxy_or_engine_has_one_status(store, engine, http, code, options):
    """A call in flight uses the memory, or the only place at the engine."""
    reached = asyncio.Event()

    async def respond(request, body):
        if request.path == "/v1/chat/completions":
            reached.set()
            await asyncio.Event().wait()

    engine.respond = respond
    endpoints = [{"url": engine.url, "name": "fake", "kind": "vllm", "max_in_flight": 1}]
    options = {**options, "engines": {**options.get("engines", {}), "endpoints": endpoints}}
    async with opened(engine, store, **options) as served:
        long = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi" * 1000}]})
        first = asyncio.ensure_future(sent(http, served, "chat", data=long))
        await reached.wait()
        try:
            assert await check(http, served, 429, code) == ("1", None)
        finally:
            first.cancel()
            await asyncio.wait([first])


async def test_an_unreachable_store_has_one_status(store, engine, http):
    failing = FailingStore(store)
    async with opened(engine, failing) as served:
        failing.failing = {"open", "get"}
        assert await check(http, served, 503, "store_unavailable") == ("1", None)


@pytest.mark.parametrize(
    ("data", "headers", "status", "code"),
    [
        (b"{", {}, 400, "bad_request"),
        (b"x" * 5000, {}, 413, "request_too_large"),
        (b"{}", {"Content-Encoding": "br"}, 415, "unsupported_encoding"),
        (None, {"Idempotency-Key": "used"}, 422, "unprocessable_request"),
    ],
    ids=["no JSON", "too large", "encoding", "idempotency key"],
)
async def test_a_request_that_is_refused_has_one_status(store, engine, http, data, headers, status, code):
    """Whichever dialect its body should have."""
    engine.plays(load("chat_ids_lp"))
    async with opened(engine, store, agents={"max_body_bytes": 4000}) as served:
        other = orjson.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 7})
        assert (await sent(http, served, "chat", data=other, **{"Idempotency-Key": "used"}))[0] == 200
        await check(http, served, status, code, data=data, **headers)


async def test_a_call_that_joins_the_group_of_others_has_one_status(store, engine, http):
    """A session of Atropos' proxy is opened before, without a group."""
    await store.groups.open("g", write_fields({"size": 1, "members": ["r"]}), now_ms=1)
    async with opened(engine, store) as served:
        await store.delete(ID)
        calls = [call for call in CALLS if call != "atropos session"]
        retry = await check(http, served, 409, "conflict", calls=calls, **{"X-Rollout-Group": "g"})

    assert retry == (None, "false")
    assert await store.get(ID) is None
