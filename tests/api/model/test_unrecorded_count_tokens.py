"""Token counts and lists of models in Anthropic's shape."""

import anthropic
import pytest
from tests.support.fakes import proxying
from tests.support.session import session_with

from proxy.server.listener import simulating
from proxy.simulator.options import Options

BODY = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]}


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_the_token_count_equals_the_prompt_tokens_of_the_call(store, http, shape, sdk):
    """The engine applies its chat template, with tools; no step is recorded."""
    body = {**BODY, "system": "Be brief.", "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine, proxying(engine, store) as served:
        client = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        counted = await client.messages.count_tokens(**body)
        response = await client.messages.create(**body, max_tokens=9)
        async with http.get(f"{served.url}/rollouts/r1") as shown:
            counts = (await shown.json())["counts"]

    assert response.usage.input_tokens == counted.input_tokens
    assert 1 == counts["steps"]


async def test_an_engine_without_token_counts_is_400(store, engine, sdk):
    async with proxying(engine.url, store) as served:
        client = sdk(anthropic.AsyncAnthropic, served.url)
        with pytest.raises(anthropic.BadRequestError, match="Counting the tokens of messages is not supported"):
            await client.messages.count_tokens(**BODY)


@pytest.mark.parametrize(
    "junk", [b"", b"no", b"null", b"[]", b'{"count": "1"}', b'{"count": null, "max_model_len": []}']
)
async def test_an_invalid_token_count_of_the_engine_is_400(store, engine, junk):
    engine.answers(junk)
    async with session_with(engine, store) as session:
        response = await session.post("/v1/messages/count_tokens", BODY)

    assert (400, True) == (response.status, b"is not supported" in response.text)


async def test_a_token_count_without_messages_is_400_in_anthropics_error_shape(store, engine, sdk):
    async with proxying(engine.url, store) as served:
        client = sdk(anthropic.AsyncAnthropic, served.url)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model="m", messages=[])


async def test_models_and_aliases_are_listed_in_anthropics_shape_for_its_clients(store, sdk):
    """An unknown model is 404."""
    aliases = {"claude-opus": "simulated", "claude-*": "absent"}
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store, models=aliases) as served:
        client = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        listed = [model.id async for model in client.models.list()]
        model = await client.models.retrieve("claude-opus")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("gpt-4o")

    assert ["simulated", "claude-opus"] == listed
    assert ("claude-opus", 32_768) == (model.id, model.max_input_tokens)
