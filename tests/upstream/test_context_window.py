"""The engine's context window: `max_tokens: auto` caps the limit of a request to the remaining tokens."""

import orjson
import pytest
from aiohttp import web
from tests.support.fakes import proxying
from tests.support.pictures import RED, image, png, url_of
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

CHAT = "/v1/chat/completions"
HELLO = {"model": "simulated", "messages": [{"role": "user", "content": "Hello! " * 20}]}
WINDOW = 600
RULES = {"sampling": {"cap": {"max_tokens": "auto"}}}


@pytest.fixture(params=["vllm", "sglang"])
async def url(request, store):
    """A proxy that caps max_tokens, in front of an engine with a small context window."""
    async with (
        simulating("127.0.0.1:0", Options(max_model_len=WINDOW, shape=request.param, seed=1)) as engine,
        proxying(engine, store, **RULES) as served,
    ):
        yield served.url


async def post(http, url, path, body):
    async with http.post(f"{url}/rollouts/r1{path}", json=body) as response:
        return response.status, orjson.loads(await response.read())


async def steps(http, url):
    async with http.get(f"{url}/rollouts/r1/steps") as response:
        return (await response.json())["steps"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_of_a_chat_request_is_capped_to_the_remaining_tokens(http, url, name):
    """Prompt and limit add up to the window; the sent value is recorded."""
    status, _ = await post(http, url, CHAT, {**HELLO, name: 32_000})
    (step,) = await steps(http, url)

    assert status == 200
    assert step["fidelity"]["exact"], step["fidelity"]
    assert {name: WINDOW - len(step["prompt_ids"])} == {key: step["sent"]["set"].get(key) for key in (name,)}


async def test_the_prompt_of_a_completions_request_is_counted_by_the_engine(http, url):
    status, _ = await post(http, url, "/v1/completions", {"model": "simulated", "prompt": "a b c", "max_tokens": 5_000})
    (step,) = await steps(http, url)

    assert status == 200
    assert WINDOW - len(step["prompt_ids"]) == step["sent"]["set"]["max_tokens"]


async def test_a_limit_that_fits_is_not_changed(http, url):
    await post(http, url, CHAT, {**HELLO, "max_tokens": 3})
    (step,) = await steps(http, url)

    assert "max_tokens" not in step["sent"]["set"]


async def test_a_prompt_longer_than_the_window_is_rejected_by_the_engine(http, url):
    """Its status and message are forwarded."""
    long = [{"role": "user", "content": "word " * 2 * WINDOW}]
    status, response = await post(http, url, CHAT, {**HELLO, "messages": long, "max_tokens": 32_000})

    assert status == 400
    assert str(WINDOW) in orjson.dumps(response).decode()


def counting(engine, response):
    """Make the engine return this count, and return the list of requested paths."""
    paths = []

    async def respond(request, body):
        paths.append(request.path)
        return web.json_response(response, status=200 if request.path == "/tokenize" and response else 500)

    engine.respond = respond
    return paths


async def test_a_prompt_that_surely_fits_is_not_counted(http, store, engine):
    """Only the first call counts, to learn the size of the window."""
    paths = counting(engine, {"count": 10, "max_model_len": 100_000})
    async with proxying(engine.url, store, **RULES) as served:
        for _ in range(3):
            await post(http, served.url, CHAT, {**HELLO, "max_tokens": 1_000})

    assert paths == ["/tokenize", CHAT, CHAT, CHAT]


async def test_the_limit_is_not_changed_if_the_engine_cannot_count(http, store, engine):
    counting(engine, None)
    async with proxying(engine.url, store, **RULES) as served:
        await post(http, served.url, CHAT, {**HELLO, "max_tokens": 32_000})

    assert engine.requests[-1]["max_tokens"] == 32_000


CALLS = {
    CHAT: {"messages": HELLO["messages"], "max_tokens": 32_000},
    "/v1/completions": {"prompt": "a b c", "max_tokens": 32_000},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 32_000},
    "/v1/responses": {"input": "Hello! " * 20, "max_output_tokens": 32_000},
}


@pytest.mark.parametrize("path", CALLS)
async def test_caps_and_model_names_are_applied_in_every_dialect(http, store, path):
    """The engine gets its own model's name and the capped limit; the response has the requested name."""
    names = {"models": {"claude-*": "simulated", "gpt-*": "simulated", "codex-*": "simulated"}}
    async with (
        simulating("127.0.0.1:0", Options(max_model_len=WINDOW, strict_models=True)) as engine,
        proxying(engine, store, **RULES, **names) as served,
    ):
        for number, model in enumerate(("claude-opus-4", "gpt-5", "codex-mini")):
            status, response = await post(http, served.url, path, {**CALLS[path], "model": model})
            step = (await steps(http, served.url))[number]

            assert (status, response["model"]) == (200, model)
            assert (step["model"]["asked"], step["model"]["served"]) == (model, "simulated")
            assert WINDOW - len(step["prompt_ids"]) == step["sent"]["set"]["max_tokens"]


BODY = {"model": "m", "messages": [{"role": "user", "content": [image(url_of(png(RED)))]}]}
IDS = {"<image>": [9], "<|image|>": [8]}
PROMPT = [1, 9, 9, 2]


def answering(engine, looked_up, *, tokenizes=True, prompt=PROMPT):
    """Make the engine return this prompt, and the ids of the names that are single tokens."""

    async def respond(request, body):
        if request.path == "/tokenize":
            looked_up.append(body["prompt"])
            if not tokenizes:
                return web.json_response({"error": "no"}, status=404)
            return web.json_response({"tokens": IDS.get(body["prompt"], [1, 2]), "count": 1, "max_model_len": 99})
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "a"},
            "finish_reason": "stop",
            "token_ids": [5],
        }
        choice |= {"logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "model": "m",
                "choices": [choice],
                "usage": usage,
                "prompt_token_ids": prompt,
            }
        )

    engine.respond = respond


async def recorded(engine, store, http, calls=1, **endpoint):
    engines = {"endpoints": [{"url": engine.url, "kind": "vllm", **endpoint}]}
    async with proxying(None, store, engines=engines, continuation={"mode": "off"}) as served:
        for _ in range(calls):
            async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
                assert response.status == 200
    return [(step.extra["images"]["token"], step.problems) for step in await stored_steps(store, "r1")]


async def test_placeholders_are_looked_up_by_name_once(engine, store, http):
    looked_up: list[str] = []
    answering(engine, looked_up)

    assert await recorded(engine, store, http, calls=2) == [(9, ())] * 2
    assert {"<image>", "<|image_pad|>"} <= set(looked_up)
    assert len(set(looked_up)) == len(looked_up)


async def test_configured_placeholders_are_not_looked_up(engine, store, http):
    looked_up: list[str] = []
    answering(engine, looked_up, prompt=[1, 77, 2])

    assert await recorded(engine, store, http, image_tokens=[77]) == [(77, ())]
    assert looked_up == []


async def test_an_empty_list_disables_the_check(engine, store, http):
    """Models with several runs of placeholders in an image need this."""
    answering(engine, [], prompt=[1, 9, 2, 9])

    assert await recorded(engine, store, http, image_tokens=[]) == [(None, ())]


async def test_another_number_of_placeholders_than_images_is_a_problem(engine, store, http):
    answering(engine, [], prompt=[1, 9, 2, 9])

    assert await recorded(engine, store, http) == [(None, ("image_count",))]


async def test_an_engine_that_does_not_tokenize_has_no_placeholder(engine, store, http):
    """It is not tried again with each call."""
    looked_up: list[str] = []
    answering(engine, looked_up, tokenizes=False)

    assert await recorded(engine, store, http, calls=2) == [(None, ())] * 2
    assert len(set(looked_up)) == len(looked_up)
