"""Texts and rendered prompts of sessions, from their engines."""

from aiohttp import web
from tests.support.sessions import HELLO, serving_sessions

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


async def test_without_detokenization_the_text_of_a_node_is_null(store, engine):
    """Its tokens are complete."""

    async def respond(request, body):
        if request.path != "/v1/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        logprobs = {"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [None], "text_offset": [0]}
        payload = {
            "index": 0,
            "text": "a",
            "finish_reason": "stop",
            "prompt_token_ids": [1],
            "token_ids": [5],
            "logprobs": logprobs,
        }
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [payload], "usage": USAGE}
        )

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        await proxy.request("POST", f"/{uuid}/v1/completions", {"prompt": [1], "max_tokens": 1})
        _, payload = await proxy.request("GET", f"/{uuid}/nodes")

    assert [(None, [1, 5])] == [(node["full_text"], node["tokens"]) for node in payload["nodes"]]


async def test_a_session_is_created_without_a_model_if_the_engine_lists_none(store, engine):
    async with serving_sessions(store, engine.url) as proxy:
        status, payload = await proxy.request("POST", "/sessions/create", {})

    assert (200, None) == (status, payload["model_name"])


async def test_rendering_with_an_engine_that_cannot_tokenize_messages_is_400(store, engine):
    engines = {"endpoints": [{"url": engine.url, "kind": "plain", "name": "text"}]}
    async with serving_sessions(store, engine.url, engines=engines) as proxy:
        uuid = await proxy.create()
        status, payload = await proxy.request("POST", f"/{uuid}/v1/chat/completions/render", {"messages": HELLO})

    assert (400, "Failed to render prompt: the engine text (plain) does not support /tokenize for messages") == (
        status,
        payload["error"]["message"],
    )
