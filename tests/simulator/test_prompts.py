"""Prompts: the context window, ids in place of messages, and images."""

import pytest
from tests.support.pictures import BLUE, RED, image, png, text, url_of
from tests.support.simulated import HELLO

from proxy.simulator.errors import RequestError
from proxy.simulator.options import Faults, Options
from proxy.simulator.prompts import PLACEHOLDER, expanded, max_tokens_after, text_to_tokenize, with_placeholders
from proxy.simulator.requests import CommonFields


@pytest.mark.parametrize(("length", "requested", "max_tokens"), [(1, None, 99), (1, 5, 5), (99, 5, 1), (60, 100, 40)])
def test_max_tokens_fits_into_the_context_window(length, requested, max_tokens):
    """A reply may have as many tokens as requested, up to the remaining tokens of the context window."""
    assert max_tokens == max_tokens_after(length, requested, CommonFields(), Options(max_model_len=100))


@pytest.mark.parametrize(
    ("length", "requested", "min_tokens", "param"),
    [
        (101, 5, 0, "input_tokens"),
        (100, 5, 0, "max_tokens"),
        (1, 101, 0, "max_tokens"),
        (1, 0, 0, "max_tokens"),
        (1, 5, 6, "min_tokens"),
    ],
)
def test_a_request_that_does_not_fit_is_an_error(length, requested, min_tokens, param):
    """The error for a prompt or a length that does not fit into the context window names the field."""
    with pytest.raises(RequestError) as error:
        max_tokens_after(length, requested, CommonFields(min_tokens=min_tokens), Options(max_model_len=100))

    assert param == error.value.body["error"]["param"]


def test_the_text_is_the_prompt_or_rendered_messages():
    """The text to tokenize is the prompt itself or the rendered messages."""
    assert text_to_tokenize({"prompt": "Hi"}) == "Hi"
    assert text_to_tokenize({"messages": [{"role": "user", "content": "Hi"}]}).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("body", [{}, {"prompt": [1]}])
def test_a_body_without_text_is_an_error(body):
    """A body with neither messages nor a prompt that is a string is a 400 error."""
    with pytest.raises(RequestError) as error:
        text_to_tokenize(body)

    assert error.value.status == 400


CHAT = "/v1/chat/completions"
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

    assert await prompt_ids(client, shape, **WAYS[shape](IDS)) == IDS
    assert chat["usage"]["prompt_tokens"] == 4
    assert chat["choices"][0][sampled] == completion["choices"][0]["token_ids"]


@SHAPES
async def test_tools_are_parsed_after_ids(shape, start, tools):
    """With ids a chat has tool calls as ever."""
    client = await start(Options(shape=shape))
    chat = await client.chat(HELLO, tools=tools, **WAYS[shape](IDS))

    assert chat["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert chat["usage"]["prompt_tokens"] == 4


async def test_the_role_chunk_of_a_vllm_stream_has_the_ids(engine):
    chunks = await engine.chat_stream(max_tokens=2, return_token_ids=True, **WAYS["vllm"](IDS))

    assert chunks[0]["prompt_token_ids"] == IDS


async def test_a_chat_by_ids_renders_nothing(start):
    """With ids, vLLM does not render the messages, so the list may be empty."""
    client = await start(Options(template="{{ raise_exception('no') }}"))

    assert await prompt_ids(client, "vllm", messages=[], **WAYS["vllm"](IDS)) == IDS


@pytest.mark.parametrize("ids", [[], "1", [1, "2"], [1, True], [-1], [1.0], {}, [10**9]])
async def test_invalid_ids_are_a_400(ids, engine):
    """An empty list, other values than ids, and ids out of the vocabulary are rejected."""
    assert (await engine.answer(CHAT, {"messages": HELLO} | WAYS["vllm"](ids)))[0] == 400


@pytest.mark.parametrize("messages", [5, "a", {"role": "user"}, [5], None])
async def test_invalid_messages_beside_ids_are_a_400(messages, engine):
    """The type of messages is checked with ids, too."""
    assert (await engine.answer(CHAT, {"messages": messages} | WAYS["vllm"](IDS)))[0] == 400


async def test_ids_are_ignored_with_echo(engine):
    """vLLM renders the messages if the request has `echo`, or no ids in its `kv_transfer_params`."""
    rendered = await prompt_ids(engine, "vllm")

    for fields in (
        {"echo": True, **WAYS["vllm"](IDS)},
        *({"kv_transfer_params": p} for p in ({"do_remote_prefill": True}, None)),
    ):
        assert rendered == await prompt_ids(engine, "vllm", **fields)


async def test_ids_are_ignored_if_content_is_not_text(engine):
    """vLLM renders the messages of a chat with an image, which this model rejects."""
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]

    assert b"image_url" in (await engine.answer(CHAT, {"messages": messages} | WAYS["vllm"](IDS)))[1]


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
    rejected, _ = await client.answer(CHAT, {"messages": HELLO} | WAYS[shape](IDS))
    unaffected = await prompt_ids(client, shape)
    faults.prompt_ids = None

    assert ([*IDS[:-1], 4], rendered, 400, rendered) == (changed, ignored, rejected, unaffected)
    assert await prompt_ids(client, shape, **WAYS[shape](IDS)) == IDS


async def test_faults_of_ids_apply_to_completions(start):
    """A prompt of ids is changed, too; there is nothing to render in its place."""
    faults = Faults("changed")
    client = await start(Options(faults=faults))
    changed = await client.completion(IDS, max_tokens=1, return_token_ids=True)
    faults.prompt_ids = "ignored"
    ignored = await client.completion(IDS, max_tokens=1, return_token_ids=True)

    assert [*IDS[:-1], 4] == changed["choices"][0]["prompt_token_ids"]
    assert ignored["choices"][0]["prompt_token_ids"] == IDS


ASK = [{"role": "user", "content": [text("a"), image(url_of(png(RED))), text("b"), image(url_of(png(BLUE)))]}]
PLACED_IDS = {"return_token_ids": True, "max_tokens": 2, "seed": 1}


async def test_a_prompt_repeats_the_placeholder_for_each_image(start):
    """At least as often as configured, and depending on the image; usage counts all of them."""
    client = await start(Options(image_tokens=4))
    body = await client.chat(ASK, **PLACED_IDS)
    ids = body["prompt_token_ids"]
    token = (await client("/tokenize", prompt=PLACEHOLDER, add_special_tokens=False))["tokens"]
    lengths = [len(part) for part in "".join("x" if i == token[0] else " " for i in ids).split()]

    assert len(token) == 1
    assert len(lengths) == 2
    assert all(4 <= length < 8 for length in lengths)
    assert len(ids) == body["usage"]["prompt_tokens"]


async def test_sglang_returns_one_placeholder_for_each_image(start):
    """Its usage counts what the model saw."""
    client = await start(Options(shape="sglang", image_tokens=4))
    body = await client.chat(ASK, **PLACED_IDS, return_prompt_token_ids=True)
    ids = body["choices"][0]["prompt_token_ids"]

    assert ids.count(max(ids)) == 2
    assert len(ids) + 2 * 3 <= body["usage"]["prompt_tokens"]


async def test_invalid_base64_and_an_image_without_a_url_are_400(start):
    client = await start(Options(image_tokens=4))
    for url in ("data:image/png;base64,@@@", None):
        body = {"messages": [{"role": "user", "content": [image(url)]}]}
        assert (await client.answer(CHAT, body))[0] == 400


def test_only_messages_with_images_are_changed():
    plain = {"role": "user", "content": "a"}
    messages, urls = with_placeholders([plain, {"role": "tool", "content": [image("https://a/b"), text("c")]}])

    assert plain is messages[0]
    assert [text(PLACEHOLDER), text("c")] == messages[1]["content"]
    assert urls == ["https://a/b"]


def test_placeholders_beyond_the_images_are_not_repeated():
    assert expanded([1, 9, 2, 9], 9, ["b"], 1) == [1, 9, 9, 2, 9]
