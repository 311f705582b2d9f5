"""What engines do with systems and developers: found out by their own counting of tokens, and by their version."""

import asyncio

import pytest
from aiohttp import web
from fakes import proxying

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "system", "content": "T"},
    {"role": "user", "content": "c"},
]
ASKED = {"model": "claude-x", "max_tokens": 9, "system": "S", "messages": TURNS}
SYSTEMS = [{"role": "system", "content": "S"}, {"role": "system", "content": "T"}]


def merging(body):
    """What an engine counts that moves all systems to the beginning, and puts nothing between them."""
    systems = [body["system"], *(turn["content"] for turn in body["messages"] if turn["role"] == "system")]
    return [("system", "".join(systems)), *(turn["role"] for turn in body["messages"] if turn["role"] != "system")]


def in_place(body):
    """What one counts that does not."""
    return [body["system"], *(turn["role"] for turn in body["messages"])]


def counting_by(rule, engine, asked):
    """Have the engine count by this rule, and let `asked` hold what it was asked."""

    async def respond(request, body):
        asked.append((request.path, body))
        if request.path != "/v1/messages/count_tokens" or rule is None:
            return web.json_response({"error": {"message": "no"}}, status=404)
        return web.json_response({"input_tokens": len(repr(rule(body)))})

    engine.respond = respond


async def called(http, url, body):
    async with http.post(f"{url}/rollouts/r1/v1/messages", json=body) as answer:
        await answer.read()


@pytest.mark.parametrize(
    ("rule", "systems"), [(merging, [{"role": "system", "content": "ST"}]), (in_place, SYSTEMS), (None, SYSTEMS)]
)
async def test_systems_stand_where_the_engine_has_them(store, engine, http, rule, systems):
    """Moved to the beginning by an engine that does so; in their place by others, and by those that do not say."""
    asked = []
    counting_by(rule, engine, asked)
    async with proxying(engine.url, store) as served:
        await called(http, served.url, ASKED)

    (chat,) = [body for path, body in asked if path == "/v1/chat/completions"]
    assert systems == [message for message in chat["messages"] if message["role"] == "system"]
    assert 2 + len(systems) + 1 == len(chat["messages"])


async def test_an_engine_is_asked_once_by_its_own_name_of_the_model(store, engine, http):
    """And only for a call that has such systems."""
    asked = []
    counting_by(in_place, engine, asked)
    async with proxying(engine.url, store, models={"claude-*": "tiny"}) as served:
        await called(http, served.url, ASKED | {"messages": TURNS[:2] + TURNS[3:]})
        assert ["/v1/chat/completions"] == [path for path, _ in asked]
        await called(http, served.url, ASKED)
        await called(http, served.url, ASKED | {"temperature": 0})

    questions = [body["model"] for path, body in asked if path == "/v1/messages/count_tokens"]
    assert ["tiny", "tiny"] == questions


async def test_an_engine_that_does_not_say_is_asked_again_for_another_model_only(store, engine, http):
    """It may know the next model; calls of the same one do not each cost a question."""
    asked = []
    counting_by(None, engine, asked)
    async with proxying(engine.url, store) as served:
        await called(http, served.url, ASKED)
        await called(http, served.url, ASKED | {"temperature": 0})
        await called(http, served.url, ASKED | {"model": "claude-y"})

    assert ["claude-x", "claude-y"] == [body["model"] for path, body in asked if path == "/v1/messages/count_tokens"]


async def test_calls_that_come_at_once_ask_once(store, engine, http):
    """The others wait for the answer."""
    asked = []
    counting_by(merging, engine, asked)
    async with proxying(engine.url, store) as served:
        await asyncio.gather(*(called(http, served.url, ASKED | {"temperature": n / 10}) for n in range(9)))

    assert 2 == [path for path, _ in asked].count("/v1/messages/count_tokens")


async def test_an_engine_that_is_silent_holds_no_call_up(store, engine, http, monkeypatch):
    """After a moment the call is made with its systems in their place."""
    monkeypatch.setattr("proxy.upstream.system_messages._COUNT_TIMEOUT_S", 0.01)
    asked, never = [], asyncio.Event()
    counting_by(None, engine, asked)
    counting = engine.respond

    async def silent(request, body):
        if request.path == "/v1/messages/count_tokens":
            await never.wait()
        return await counting(request, body)

    engine.respond = silent
    async with proxying(engine.url, store) as served:
        await called(http, served.url, ASKED)

    ((path, chat),) = asked
    assert ("/v1/chat/completions", SYSTEMS) == (path, [each for each in chat["messages"] if each["role"] == "system"])


async def test_the_count_that_a_client_asks_for_is_of_that_prompt(store, engine, http):
    """The same messages are counted that a call would send."""
    asked = []
    counting_by(merging, engine, asked)
    async with proxying(engine.url, store) as served:
        body = {name: ASKED[name] for name in ("model", "system", "messages")}
        async with http.post(f"{served.url}/v1/messages/count_tokens", json=body) as answer:
            await answer.read()

    (tokenized,) = [body for path, body in asked if path == "/tokenize"]
    assert ["system", "user", "assistant", "user"] == [message["role"] for message in tokenized["messages"]]


async def test_engines_of_other_kinds_are_not_asked(store, engine, http):
    """Nothing is known of what they do."""
    asked = []
    counting_by(merging, engine, asked)
    engines = {"endpoints": [{"url": engine.url, "name": "fake", "kind": "llamacpp"}]}
    async with proxying(None, store, engines=engines) as served:
        await called(http, served.url, ASKED)

    assert ["/v1/chat/completions"] == [path for path, _ in asked]


@pytest.mark.parametrize(
    ("version", "roles"), [("0.32.0", ["system", "developer", "user"]), ("0.22.1", ["system", "user"])]
)
async def test_developers_are_sent_to_engines_that_show_them_to_every_template(store, engine, http, version, roles):
    """To an older vLLM they are systems: it lets templates drop what developers say."""
    asked = []
    counting_by(None, engine, asked)
    engine.fixed_responses["/version"] = {"version": version}
    said = [{"role": "developer", "content": "D"}, {"role": "user", "content": "u"}]
    async with (
        proxying(engine.url, store) as served,
        http.post(
            f"{served.url}/rollouts/r1/v1/responses", json={"model": "m", "instructions": "I", "input": said}
        ) as answer,
    ):
        await answer.read()

    ((_, chat),) = asked
    assert roles == [message["role"] for message in chat["messages"]]
