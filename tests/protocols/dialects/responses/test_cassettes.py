"""The dialect's laws on every chat answer that was recorded from an engine."""

import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from recorded import dialect_cassettes, http_cassettes
from responses_drawn import TOLD, as_chat, events_of

from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.dialects.responses import RESPONSES
from proxy.protocols.dialects.translation import TranslationOptions

EVENT = TypeAdapter(ResponseStreamEvent)
BODY = {"input": "hi", "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
KINDS = ("vllm", "sglang", "llamacpp")
CHATS = [
    cassette
    for found in (*map(dialect_cassettes, KINDS), *map(http_cassettes, ("sglang", "llamacpp")))
    for cassette in found
    if cassette.path == "/v1/chat/completions" and cassette.status == 200
]


def told_by(cassette):
    """The chunks and the whole response of a stream."""
    events = [event.removeprefix("data: ") for event in cassette.response.decode().split("\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith("{")]
    fold = ChatAccumulator()
    for chunk in chunks:
        fold.feed(chunk)
    return chunks, fold.finish()


def joined(answer):
    """The answer with the texts of its messages as one: vLLM's hermes parser tells text between two calls."""
    messages = [item for item in answer["output"] if item["type"] == "message"]
    texts = [part["text"] for item in messages for part in item["content"]]
    logprobs = [entry for item in messages for part in item["content"] for entry in part["logprobs"]]
    others = [item for item in answer["output"] if item not in messages]
    return {**answer, "output": [others, "".join(texts), logprobs, bool(texts)]}


def name_of(cassette):
    return f"{cassette.kind}-{cassette}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_engines_stream_is_told_whole_and_comes_back(kind):
    """Streamed and whole agree, each event is of the SDK's types, and the message read again is the one that was sampled."""
    streams = [
        cassette
        for cassette in CHATS
        if cassette.kind == kind and cassette.is_stream and b'"error"' not in cassette.response
    ]
    assert len(streams) > 5
    for cassette in streams:
        chunks, response = told_by(cassette)
        renderer = RESPONSES.renderer(BODY, TOLD)
        events = events_of(b"".join([*map(renderer.feed, chunks), renderer.finish(response)]))
        for event in events[::5] + events[-1:]:
            EVENT.validate_python(event)
        whole = RESPONSES.renderer(BODY, TOLD).whole(response)
        assert joined(events[-1]["response"]) == joined(whole), name_of(cassette)
        read = RESPONSES.read({"input": events[-1]["response"]["output"]}, TranslationOptions())
        assert [as_chat(response["choices"][0]["message"])] == read["messages"], name_of(cassette)


@pytest.mark.parametrize("kind", KINDS)
def test_what_engines_answer_whole_comes_back(kind):
    """The same of unstreamed answers."""
    answers = [cassette for cassette in CHATS if cassette.kind == kind and not cassette.is_stream]
    assert len(answers) > 5
    for cassette in answers:
        response = orjson.loads(cassette.response)
        answer = RESPONSES.renderer(BODY, TOLD).whole(response)
        Response.model_validate(answer)
        read = RESPONSES.read({"input": answer["output"]}, TranslationOptions())
        message = response["choices"][0]["message"]
        assert [as_chat(message)] == read["messages"], name_of(cassette)
