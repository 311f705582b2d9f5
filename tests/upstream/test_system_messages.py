"""The engine's handling of system and developer messages, detected by its token counts and version."""

import asyncio

import pytest
from aiohttp import web
from tests.support.fakes import proxying

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "system", "content": "T"},
    {"role": "user", "content": "c"},
]
BODY = {"model": "claude-x", "max_tokens": 9, "system": "S", "messages": TURNS}
SYSTEMS = [{"role": "system", "content": "S"}, {"role": "system", "content": "T"}]


def merging(body):
    """Count like an engine that moves all system messages to the beginning and concatenates them."""
    systems = [body["system"], *(turn["content"] for turn in body["messages"] if turn["role"] == "system")]
    return [("system", "".join(systems)), *(turn["role"] for turn in body["messages"] if turn["role"] != "system")]


def in_place(body):
    """Count like an engine that keeps system messages in place."""
    return [body["system"], *(turn["role"] for turn in body["messages"])]


def counting_by(rule, engine, requests):
    """Make the engine count by this rule, and append its requests to `requests`."""

    async def respond(request, body):
        requests.append((request.path, body))
        if request.path != "/v1/messages/count_tokens" or rule is None:
            return web.json_response({"error": {"message": "no"}}, status=404)
        return web.json_response({"input_tokens": len(repr(rule(body)))})

    engine.respond = respond


@pytest.fixture
async def served(engine, store):
    """A proxy in front of the fake engine."""
    async with proxying(engine.url, store) as served:
        yield served


async def post(http, url, body):
    async with http.post(f"{url}/rollouts/r1/v1/messages", json=body) as response:
        await response.read()


@pytest.mark.parametrize(
    ("rule", "systems"), [(merging, [{"role": "system", "content": "ST"}]), (in_place, SYSTEMS), (None, SYSTEMS)]
)
async def test_system_messages_are_placed_as_the_engine_places_them(engine, http, rule, systems, served):
    """Merged at the beginning for an engine that does so; in place for others and for those that cannot count."""
    requests = []
    counting_by(rule, engine, requests)
    await post(http, served.url, BODY)

    (chat,) = [body for path, body in requests if path == "/v1/chat/completions"]
    assert systems == [message for message in chat["messages"] if message["role"] == "system"]
    assert 2 + len(systems) + 1 == len(chat["messages"])


async def test_the_placement_is_requested_once_with_the_engines_model_name(store, engine, http):
    """Only for a call with system messages in the conversation."""
    requests = []
    counting_by(in_place, engine, requests)
    async with proxying(engine.url, store, models={"claude-*": "tiny"}) as served:
        await post(http, served.url, BODY | {"messages": TURNS[:2] + TURNS[3:]})
        assert [path for path, _ in requests] == ["/v1/chat/completions"]
        await post(http, served.url, BODY)
        await post(http, served.url, BODY | {"temperature": 0})

    models = [body["model"] for path, body in requests if path == "/v1/messages/count_tokens"]
    assert models == ["tiny", "tiny"]


async def test_an_engine_that_cannot_count_gets_one_request_per_model(engine, http, served):
    requests = []
    counting_by(None, engine, requests)
    await post(http, served.url, BODY)
    await post(http, served.url, BODY | {"temperature": 0})
    await post(http, served.url, BODY | {"model": "claude-y"})

    assert [body["model"] for path, body in requests if path == "/v1/messages/count_tokens"] == ["claude-x", "claude-y"]


async def test_concurrent_calls_share_one_count_request(engine, http, served):
    requests = []
    counting_by(merging, engine, requests)
    await asyncio.gather(*(post(http, served.url, BODY | {"temperature": n / 10}) for n in range(9)))

    assert [path for path, _ in requests].count("/v1/messages/count_tokens") == 2


async def test_a_count_request_that_times_out_does_not_delay_the_call_further(engine, http, monkeypatch, served):
    """The call is sent with its system messages in place."""
    monkeypatch.setattr("proxy.upstream.context_window._COUNT_TIMEOUT_S", 0.01)
    requests, never = [], asyncio.Event()
    counting_by(None, engine, requests)
    counting = engine.respond

    async def silent(request, body):
        if request.path == "/v1/messages/count_tokens":
            await never.wait()
        return await counting(request, body)

    engine.respond = silent
    await post(http, served.url, BODY)

    ((path, chat),) = requests
    assert (
        path,
        [message for message in chat["messages"] if message["role"] == "system"],
    ) == ("/v1/chat/completions", SYSTEMS)


async def test_count_tokens_counts_the_messages_that_a_call_would_send(engine, http, served):
    requests = []
    counting_by(merging, engine, requests)
    body = {name: BODY[name] for name in ("model", "system", "messages")}
    async with http.post(f"{served.url}/v1/messages/count_tokens", json=body) as response:
        await response.read()

    (tokenized,) = [body for path, body in requests if path == "/tokenize"]
    assert [message["role"] for message in tokenized["messages"]] == ["system", "user", "assistant", "user"]


async def test_other_engine_types_get_no_count_request(store, engine, http):
    requests = []
    counting_by(merging, engine, requests)
    engines = {"endpoints": [{"url": engine.url, "name": "fake", "kind": "llamacpp"}]}
    async with proxying(None, store, engines=engines) as served:
        await post(http, served.url, BODY)

    assert [path for path, _ in requests] == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("version", "roles"), [("0.32.0", ["system", "developer", "user"]), ("0.22.1", ["system", "user"])]
)
async def test_developer_messages_are_sent_to_engines_that_support_them(store, engine, http, version, roles):
    """An older vLLM gets system messages: its templates may drop developer messages."""
    requests = []
    counting_by(None, engine, requests)
    engine.fixed_responses["/version"] = {"version": version}
    items = [{"role": "developer", "content": "D"}, {"role": "user", "content": "u"}]
    async with (
        proxying(engine.url, store) as served,
        http.post(
            f"{served.url}/rollouts/r1/v1/responses", json={"model": "m", "instructions": "I", "input": items}
        ) as response,
    ):
        await response.read()

    ((_, chat),) = requests
    assert roles == [message["role"] for message in chat["messages"]]
