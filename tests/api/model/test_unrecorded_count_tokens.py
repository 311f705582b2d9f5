"""Tokens counted before anything is sampled."""

import anthropic
import pytest
from aiohttp import web
from fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options

SAID = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]}


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_the_count_is_the_prompt_that_the_call_then_has(store, http, shape, sdk):
    """By the engine's own template, tools and all; it leaves no step."""
    said = {**SAID, "system": "Be brief.", "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine, proxying(engine, store) as served:
        client = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        counted = await client.messages.count_tokens(**said)
        response = await client.messages.create(**said, max_tokens=9)
        async with http.get(f"{served.url}/rollouts/r1") as shown:
            counts = (await shown.json())["counts"]

    assert response.usage.input_tokens == counted.input_tokens
    assert 1 == counts["steps"]


async def test_an_engine_that_cannot_count_is_said(store, engine, sdk):
    """Nothing is guessed."""
    async with proxying(engine.url, store) as served:
        client = sdk(anthropic.AsyncAnthropic, served.url)
        with pytest.raises(anthropic.BadRequestError, match="Counting the tokens of messages is not supported"):
            await client.messages.count_tokens(**SAID)


@pytest.mark.parametrize(
    "junk", [b"", b"no", b"null", b"[]", b'{"count": "1"}', b'{"count": null, "max_model_len": []}']
)
async def test_a_count_that_is_none_is_as_no_count(store, engine, http, junk):
    """Whatever the engine answers: the client learns that it cannot count."""

    async def respond(request, body):
        return web.Response(body=junk, content_type="application/json")

    engine.respond = respond
    async with (
        proxying(engine.url, store) as served,
        http.post(served.url + "/v1/messages/count_tokens", json=SAID) as response,
    ):
        assert (400, True) == (response.status, "is not supported" in await response.text())


async def test_what_is_no_conversation_is_refused(store, engine, sdk):
    """In Anthropic's shape, naming it."""
    async with proxying(engine.url, store) as served:
        client = sdk(anthropic.AsyncAnthropic, served.url)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model="m", messages=[])


async def test_models_are_listed_in_anthropics_shape_for_its_clients(store, sdk):
    """Aliases among them; one that is not there is 404."""
    aliases = {"claude-opus": "simulated", "claude-*": "nobody"}
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store, models=aliases) as served:
        client = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("claude-opus")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("gpt-4o")

    assert ["simulated", "claude-opus"] == listed
    assert ("claude-opus", 32_768) == (one.id, one.max_input_tokens)
