"""Recorded chat responses of every engine, rendered as Responses API output and read back."""

import orjson
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.support.anthropic_events import folded
from tests.support.each_cassette import of_each
from tests.support.recorded import dialect_cassettes, http_cassettes
from tests.support.responses_drawn import IDENTITY, as_chat, events_of

from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.dialects.responses import RESPONSES

EVENT = TypeAdapter(ResponseStreamEvent)
BODY = {"input": "hi", "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
KINDS = ("vllm", "sglang", "llamacpp")
CHATS = [
    cassette
    for found in (*map(dialect_cassettes, KINDS), http_cassettes("llamacpp"))
    for cassette in found
    if cassette.path == "/v1/chat/completions" and cassette.status == 200
]


def accumulated(cassette):
    """Return the chunks of a stream and the response that they accumulate to."""
    events = [event.removeprefix("data: ") for event in cassette.response.decode().split("\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith("{")]
    return chunks, folded(chunks)


def with_joined_text(response):
    """Return the response with all its text joined: vLLM's hermes parser emits text between two tool calls."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    texts = [part["text"] for item in messages for part in item["content"]]
    logprobs = [entry for item in messages for part in item["content"] for entry in part["logprobs"]]
    others = [item for item in response["output"] if item not in messages]
    return {**response, "output": [others, "".join(texts), logprobs, bool(texts)]}


@of_each(cassette for cassette in CHATS if cassette.is_stream and b'"error"' not in cassette.response)
def test_recorded_streams_are_rendered_and_read_back(cassette):
    """Streamed and unstreamed output agree, events have the SDK's types, and the message read back is the sampled one."""
    chunks, response = accumulated(cassette)
    renderer = RESPONSES.renderer(BODY, IDENTITY)
    events = events_of(b"".join([*map(renderer.feed, chunks), renderer.finish(response)]))
    for event in events[::5] + events[-1:]:
        EVENT.validate_python(event)
    shown = events[-1]["response"]

    assert with_joined_text(shown) == with_joined_text(RESPONSES.renderer(BODY, IDENTITY).whole(response))
    assert [as_chat(response["choices"][0]["message"])] == read_again(shown)


@of_each(cassette for cassette in CHATS if not cassette.is_stream)
def test_recorded_responses_are_rendered_and_read_back(cassette):
    response = orjson.loads(cassette.response)
    answer = RESPONSES.renderer(BODY, IDENTITY).whole(response)
    Response.model_validate(answer)

    assert [as_chat(response["choices"][0]["message"])] == read_again(answer)


def read_again(response):
    return RESPONSES.read({"input": response["output"]}, TranslationOptions())["messages"]
