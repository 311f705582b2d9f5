"""The model's window: agents that ask for more than is left get what is left."""

import orjson
import pytest
from aiohttp import web
from fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options

CHAT = "/v1/chat/completions"
HELLO = {"model": "simulated", "messages": [{"role": "user", "content": "Hello! " * 20}]}
WINDOW = 600
RULES = {"sampling": {"cap": {"max_tokens": "auto"}}}


@pytest.fixture(params=["vllm", "sglang"])
async def url(request, store):
    """A proxy whose agents' bounds are capped by the window, before an engine with a small one."""
    async with (
        simulating("127.0.0.1:0", Options(max_model_len=WINDOW, shape=request.param, seed=1)) as engine,
        proxying(engine, store, **RULES) as served,
    ):
        yield served.url


async def called(http, url, path, body):
    async with http.post(f"{url}/rollouts/r1{path}", json=body) as answer:
        return answer.status, orjson.loads(await answer.read())


async def steps(http, url):
    async with http.get(f"{url}/rollouts/r1/steps") as answer:
        return (await answer.json())["steps"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_that_asks_for_more_than_the_window_gets_what_it_leaves(http, url, name):
    """Exactly so much: prompt and bound make the window. What was sent is recorded."""
    status, _ = await called(http, url, CHAT, {**HELLO, name: 32_000})
    (step,) = await steps(http, url)

    assert 200 == status
    assert step["fidelity"]["exact"], step["fidelity"]
    assert {name: WINDOW - len(step["prompt_ids"])} == {key: step["sent"]["set"].get(key) for key in (name,)}


async def test_a_text_that_is_to_be_completed_is_counted_too(http, url):
    """By the same engine, as it will read it."""
    status, _ = await called(
        http, url, "/v1/completions", {"model": "simulated", "prompt": "a b c", "max_tokens": 5_000}
    )
    (step,) = await steps(http, url)

    assert 200 == status
    assert WINDOW - len(step["prompt_ids"]) == step["sent"]["set"]["max_tokens"]


async def test_a_bound_that_fits_stays_as_it_is(http, url):
    """Nothing is set that need not be."""
    await called(http, url, CHAT, {**HELLO, "max_tokens": 3})
    (step,) = await steps(http, url)

    assert "max_tokens" not in step["sent"]["set"]


async def test_a_prompt_that_leaves_nothing_is_the_engines_to_refuse(http, url):
    """In its own words, and with its own status."""
    long = [{"role": "user", "content": "word " * 2 * WINDOW}]
    status, answer = await called(http, url, CHAT, {**HELLO, "messages": long, "max_tokens": 32_000})

    assert 400 == status
    assert str(WINDOW) in orjson.dumps(answer).decode()


def counting(engine, answer):
    """The engine answers so to a count, and the paths that were asked are kept."""
    paths = []

    async def respond(request, body):
        paths.append(request.path)
        return web.json_response(answer, status=200 if request.path == "/tokenize" and answer else 500)

    engine.respond = respond
    return paths


async def test_prompts_are_counted_only_where_it_matters(http, store, engine):
    """Once for the window; then no more for calls that surely fit."""
    paths = counting(engine, {"count": 10, "max_model_len": 100_000})
    async with proxying(engine.url, store, **RULES) as served:
        for _ in range(3):
            await called(http, served.url, CHAT, {**HELLO, "max_tokens": 1_000})

    assert ["/tokenize", CHAT, CHAT, CHAT] == paths


async def test_an_engine_that_cannot_count_is_asked_as_the_client_asks(http, store, engine):
    """Nothing is guessed."""
    counting(engine, None)
    async with proxying(engine.url, store, **RULES) as served:
        await called(http, served.url, CHAT, {**HELLO, "max_tokens": 32_000})

    assert 32_000 == engine.requests[-1]["max_tokens"]


CALLS = {
    CHAT: {"messages": HELLO["messages"], "max_tokens": 32_000},
    "/v1/completions": {"prompt": "a b c", "max_tokens": 32_000},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 32_000},
    "/v1/responses": {"input": "Hello! " * 20, "max_output_tokens": 32_000},
}


@pytest.mark.parametrize("path", CALLS)
async def test_caps_and_names_that_agents_insist_on_hold_in_every_dialect(http, store, path):
    """What the window leaves is sent, of the model that is there; the answer names the one that was asked for."""
    names = {"models": {"claude-*": "simulated", "gpt-*": "simulated", "codex-*": "simulated"}}
    async with (
        simulating("127.0.0.1:0", Options(max_model_len=WINDOW, strict_models=True)) as engine,
        proxying(engine, store, **RULES, **names) as served,
    ):
        for number, model in enumerate(("claude-opus-4", "gpt-5", "codex-mini")):
            status, answer = await called(http, served.url, path, {**CALLS[path], "model": model})
            step = (await steps(http, served.url))[number]

            assert (200, model) == (status, answer["model"])
            assert (model, "simulated") == (step["model"]["asked"], step["model"]["served"])
            assert WINDOW - len(step["prompt_ids"]) == step["sent"]["set"]["max_tokens"]
