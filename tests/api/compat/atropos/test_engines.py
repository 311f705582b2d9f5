"""Engines, as sessions ask them: texts and prompts, where they can be had."""

from aiohttp import web
from sessions import HELLO, serving_sessions

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


async def test_without_a_tokenizer_an_engine_that_makes_no_texts_leaves_them_null(store, engine):
    """A node's text is not made up; its tokens are there."""

    async def respond(request, body):
        if request.path != "/v1/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        logprobs = {"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [None], "text_offset": [0]}
        told = {
            "index": 0,
            "text": "a",
            "finish_reason": "stop",
            "prompt_token_ids": [1],
            "token_ids": [5],
            "logprobs": logprobs,
        }
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [told], "usage": USAGE}
        )

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        await proxy.request("POST", f"/{uuid}/v1/completions", {"prompt": [1], "max_tokens": 1})
        _, told = await proxy.request("GET", f"/{uuid}/nodes")

    assert [(None, [1, 5])] == [(node["full_text"], node["tokens"]) for node in told["nodes"]]


async def test_a_session_of_an_engine_that_is_silent_about_its_model_has_none(store, engine):
    """It is created all the same: engines may be away."""
    async with serving_sessions(store, engine.url) as proxy:
        status, told = await proxy.request("POST", "/sessions/create", {})

    assert (200, None) == (status, told["model_name"])


async def test_an_engine_without_a_tokenize_of_messages_renders_nothing(store, engine):
    """It is said which, and why."""
    engines = {"endpoints": [{"url": engine.url, "kind": "plain", "name": "text"}]}
    async with serving_sessions(store, engine.url, engines=engines) as proxy:
        uuid = await proxy.create()
        status, told = await proxy.request("POST", f"/{uuid}/v1/chat/completions/render", {"messages": HELLO})

    assert (400, "Failed to render prompt: the engine text (plain) does not support /tokenize for messages") == (
        status,
        told["error"]["message"],
    )
