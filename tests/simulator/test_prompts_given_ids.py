"""Prompts that are given as ids."""

import pytest

from proxy.simulator.options import Faults, Options

HELLO = [{"role": "user", "content": "Say hello to the world."}]
IDS = [1, 2, 700, 3]
WAYS = {"vllm": lambda ids: {"kv_transfer_params": {"prompt_token_ids": ids}}, "sglang": lambda ids: {"input_ids": ids}}
SHAPES = pytest.mark.parametrize("shape", WAYS)


async def prompt_ids(client, shape, **body):
    """The prompt's ids in the response to a chat."""
    body = {"messages": HELLO, "max_tokens": 2, "seed": 1, "return_token_ids": True} | body
    response = await client("/v1/chat/completions", **body)
    return response["prompt_token_ids"] if shape == "vllm" else response["choices"][0]["prompt_token_ids"]


@SHAPES
async def test_ids_replace_the_rendered_messages(shape, start):
    """The response returns the ids of the request, and has the tokens of a completion of these ids."""
    client = await start(Options(shape=shape))
    chat = await client.chat(HELLO, max_tokens=5, seed=1, return_token_ids=True, **WAYS[shape](IDS))
    completion = await client.completion(IDS, max_tokens=5, seed=1, return_token_ids=True)
    sampled = "token_ids" if shape == "vllm" else "response_token_ids"

    assert IDS == await prompt_ids(client, shape, **WAYS[shape](IDS))
    assert 4 == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0][sampled] == completion["choices"][0]["token_ids"]


@SHAPES
async def test_tools_are_parsed_after_ids(shape, start, tools):
    """With ids a chat has tool calls as ever."""
    client = await start(Options(shape=shape))
    chat = await client.chat(HELLO, tools=tools, **WAYS[shape](IDS))

    assert "get_weather" == chat["choices"][0]["message"]["tool_calls"][0]["function"]["name"]
    assert 4 == chat["usage"]["prompt_tokens"]


async def test_a_vllm_stream_returns_the_ids(start):
    """The role chunk has the ids of the request."""
    client = await start(Options())
    chunks = await client.chat_stream(max_tokens=2, return_token_ids=True, **WAYS["vllm"](IDS))

    assert IDS == chunks[0]["prompt_token_ids"]


async def test_a_chat_by_ids_renders_nothing(start):
    """With ids, vLLM does not render the messages, of which there may be none."""
    client = await start(Options(template="{{ raise_exception('no') }}"))

    assert IDS == await prompt_ids(client, "vllm", messages=[], **WAYS["vllm"](IDS))


@pytest.mark.parametrize("ids", [[], "1", [1, "2"], [1, True], [-1], [1.0], {}, [10**9]])
async def test_invalid_ids_are_a_400(ids, start):
    """An empty list, other values than ids, and ids out of the vocabulary are rejected."""
    client = await start(Options())
    async with client.client.post("/v1/chat/completions", json={"messages": HELLO} | WAYS["vllm"](ids)) as response:
        assert 400 == response.status


@pytest.mark.parametrize("messages", [5, "a", {"role": "user"}, [5], None])
async def test_invalid_messages_beside_ids_are_a_400(messages, start):
    """The type of messages is checked with ids, too."""
    client = await start(Options())
    async with client.client.post("/v1/chat/completions", json={"messages": messages} | WAYS["vllm"](IDS)) as response:
        assert 400 == response.status


async def test_ids_are_ignored_with_echo(start):
    """vLLM renders the messages if the request has `echo`, or no ids in its `kv_transfer_params`."""
    client = await start(Options())
    rendered = await prompt_ids(client, "vllm")

    assert rendered == await prompt_ids(client, "vllm", echo=True, **WAYS["vllm"](IDS))
    assert rendered == await prompt_ids(client, "vllm", kv_transfer_params={"do_remote_prefill": True})
    assert rendered == await prompt_ids(client, "vllm", kv_transfer_params=None)


async def test_ids_are_ignored_if_content_is_not_text(start):
    """vLLM renders the messages of a chat with an image, which this model rejects."""
    client = await start(Options())
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    async with client.client.post("/v1/chat/completions", json={"messages": messages} | WAYS["vllm"](IDS)) as response:
        assert "image_url" in await response.text()


@SHAPES
async def test_faults_of_ids(shape, start):
    """An engine with a fault changes the last id, renders the messages, or rejects ids; tests switch it at any time."""
    faults = Faults()
    client = await start(Options(shape=shape, faults=faults))
    rendered = await prompt_ids(client, shape)
    faults.prompt_ids = "changed"
    changed = await prompt_ids(client, shape, **WAYS[shape](IDS))
    faults.prompt_ids = "ignored"
    ignored = await prompt_ids(client, shape, **WAYS[shape](IDS))
    faults.prompt_ids = "rejected"
    async with client.client.post("/v1/chat/completions", json={"messages": HELLO} | WAYS[shape](IDS)) as response:
        rejected = response.status
    unaffected = await prompt_ids(client, shape)
    faults.prompt_ids = None

    assert ([*IDS[:-1], 4], rendered, 400, rendered) == (changed, ignored, rejected, unaffected)
    assert IDS == await prompt_ids(client, shape, **WAYS[shape](IDS))


async def test_faults_of_ids_apply_to_completions(start):
    """A prompt of ids is changed, too; there is nothing to render in its place."""
    faults = Faults("changed")
    client = await start(Options(faults=faults))
    changed = await client.completion(IDS, max_tokens=1, return_token_ids=True)
    faults.prompt_ids = "ignored"
    ignored = await client.completion(IDS, max_tokens=1, return_token_ids=True)

    assert [*IDS[:-1], 4] == changed["choices"][0]["prompt_token_ids"]
    assert IDS == ignored["choices"][0]["prompt_token_ids"]
