"""Responses, unstreamed and streamed, as Google's clients read them, and as the next request returns them."""

from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.anthropic_events import atoms, chunks_of, folded, messages, response_of
from tests.support.gemini_responses import chunks_in, events_of, joined, sent_back, strictly

from proxy.protocols.dialects.base import CallIdentity, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.gemini import GEMINI
from proxy.protocols.dialects.gemini.contents import sign
from proxy.protocols.dialects.translation import call_ids

IDENTITY = CallIdentity("01a9", 1795229441, "gemini-pro")
THOUGHTS = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
SSE = {"model": "gemini-pro", "stream": True, "alt": "sse"}
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def whole(response, body=SSE):
    return GEMINI.renderer(body, IDENTITY).whole(response)


def streamed(chunks, response=None, error=None, body=SSE) -> bytes:
    renderer = GEMINI.renderer(body, IDENTITY)
    return b"".join(renderer.feed(chunk) for chunk in chunks) + renderer.finish(response or folded(chunks), error)


def essence(message) -> bytes:
    """Return a chat message as the next request has it; an empty text is absent, and calls have the rendered ids."""
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls") or []
    named = [call | {"id": name} for call, name in zip(calls, call_ids(calls, "01a9", "call"), strict=True)]
    return orjson.dumps([message["content"] or "", thoughts, named])


def read_again(message, contents) -> bytes:
    """Return the message that is read from contents that the client sends back."""
    calls = message.get("tool_calls") or []
    sampled = {name: call["function"] for name, call in zip(call_ids(calls, "01a9", "call"), calls, strict=True)}
    body = {"contents": contents}
    assert set(GEMINI.references(body).calls) == set(sampled)
    (_, read, *_rest) = GEMINI.read(body, TranslationOptions(), ResolvedReferences(calls=sampled))["messages"]
    return essence(read)


@settings(max_examples=30)
@given(messages(), st.booleans())
def test_an_unstreamed_response_is_read_back_as_the_sampled_message(message, shows_thoughts):
    """Byte for byte: ids, arguments and reasoning, whether the client requests thoughts or not."""
    response = whole(response_of(message), THOUGHTS if shows_thoughts else {})

    strictly(response)
    assert essence(message) == read_again(message, sent_back([response]))


@settings(max_examples=30)
@given(messages(), SIZES, st.booleans(), st.booleans(), st.booleans())
def test_a_stream_has_the_parts_of_the_unstreamed_response(message, sizes, apart, shows_thoughts, is_array):
    """For any chunking; the SDKs send a content for each chunk back, which is read as the sampled message."""
    body = (THOUGHTS if shows_thoughts else {}) | ({} if is_array else SSE)
    chunks = chunks_of(atoms(message), sizes, response_of(message), apart=apart)
    response = folded(chunks)

    found = chunks_in(streamed(chunks, body=body), is_array=is_array)
    expected = whole(response, body)

    parts = joined(found)[0]
    assert joined([expected])[0] == ([part for part in parts if part != {"text": ""}] or parts)
    assert all(candidate["content"]["parts"] for chunk in found for candidate in chunk["candidates"])
    assert (expected["usageMetadata"], "finishReason") == (
        found[-1]["usageMetadata"],
        *(name for name in found[-1]["candidates"][0] if name == "finishReason"),
    )
    assert essence(response["choices"][0]["message"]) == read_again(message, sent_back(found))


@settings(max_examples=20)
@given(messages(), SIZES)
def test_a_client_without_ids_and_thoughts_sends_back_the_sampled_message(message, sizes):
    """LangChain drops the ids of calls, gemini-cli the thoughts; both return signatures."""
    chunks = chunks_of(atoms(message), sizes, response_of(message), apart=True)
    contents = sent_back(chunks_in(streamed(chunks, body=SSE | THOUGHTS)))
    for content in contents:
        content["parts"] = [part for part in content["parts"] if not part.get("thought")] or [{"text": ""}]
        for part in content["parts"]:
            part.get("functionCall", {}).pop("id", None)

    assert essence(message) == read_again(message, contents)


@settings(max_examples=20)
@given(messages(), SIZES, st.integers(0, 40))
def test_a_function_call_and_the_finish_reason_are_in_the_last_chunk(message, sizes, count):
    """Nothing before it shows that the turn is over, or makes an agent run a function."""
    chunks = chunks_of(atoms(message), sizes, response_of(message), apart=False)
    renderer = GEMINI.renderer(SSE, IDENTITY)
    fed = b"".join(renderer.feed(chunk) for chunk in chunks[:count])

    assert b"functionCall" not in fed
    assert b"finishReason" not in fed
    assert b"usageMetadata" not in fed


def test_the_wire_format_of_an_unstreamed_response():
    """Written by hand from https://ai.google.dev/api/generate-content."""
    message = {"role": "assistant", "content": "It is sunny.", "reasoning": "Hm."}
    response = response_of(message, "length")

    assert {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "Hm.", "thought": True},
                        {"text": "It is sunny.", "thoughtSignature": sign(thoughts="Hm.")},
                    ],
                    "role": "model",
                },
                "finishReason": "MAX_TOKENS",
                "index": 0,
            }
        ],
        "usageMetadata": {"promptTokenCount": 33, "candidatesTokenCount": 5, "totalTokenCount": 38},
        "modelVersion": "gemini-pro",
        "responseId": "01a9",
    } == whole(response, THOUGHTS)


def test_the_wire_format_of_a_stream_of_events():
    """Without a terminal event; each event is a response."""
    chunks = chunks_of(atoms({"content": "Hi."}), [2, 1], response_of({"content": "Hi."}), apart=True)
    head = b'"modelVersion":"gemini-pro","responseId":"01a9"}\r\n\r\n'
    usage = b'"usageMetadata":{"promptTokenCount":33,"candidatesTokenCount":5,"totalTokenCount":38},'

    assert streamed(chunks) == (
        b'data: {"candidates":[{"content":{"parts":[{"text":"Hi"}],"role":"model"},"index":0}],' + head
        + b'data: {"candidates":[{"content":{"parts":[{"text":"."}],"role":"model"},"index":0}],' + head
        + b'data: {"candidates":[{"content":{"parts":[{"text":""}],"role":"model"},"index":0,"finishReason":"STOP"}],'
        + usage + head
    )  # fmt: skip


def test_the_wire_format_of_a_stream_as_an_array():
    """The entries of one JSON array arrive one by one."""
    chunks = chunks_of(atoms({"content": "Hi"}), [1], response_of({"content": "Hi"}), apart=False)
    stream = streamed(chunks, body={})

    assert stream.startswith(b'[{"candidates":')
    assert stream.endswith(b"}]\n")
    assert stream.count(b"},\r\n{") == stream.count(b"\r\n") - 0 == 2
    assert [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in orjson.loads(stream)] == ["H", "i", ""]


def test_several_candidates_have_their_own_parts_and_ends():
    """By their index."""
    choices = [
        {"index": number, "message": {"content": text}, "finish_reason": finish}
        for number, (text, finish) in enumerate([("a", "stop"), ("b", "length")])
    ]
    renderer = GEMINI.renderer(SSE, IDENTITY)
    fed = [
        renderer.feed({"choices": [{"index": number, "delta": {"content": text}}]})
        for number, text in ((1, "b"), (0, "a"))
    ]
    stream = b"".join(fed) + renderer.finish({"choices": choices, "usage": None})

    assert (
        joined(events_of(stream)) == joined([whole({"choices": choices})]) == {0: [{"text": "a"}], 1: [{"text": "b"}]}
    )
    assert [candidate["finishReason"] for candidate in events_of(stream)[-1]["candidates"]] == ["STOP", "MAX_TOKENS"]


@pytest.mark.parametrize("body", [SSE, {}])
def test_an_error_ends_a_stream(body):
    """After its texts, or alone; both SDKs raise it."""
    chunks = chunks_of(atoms({"content": "Hi"}), [9], response_of({"content": "Hi"}), apart=False)[:2]

    for fed, length in ((chunks, 2), ([], 1)):
        found = chunks_in(streamed(fed, {}, "broke off", body), is_array=not body)
        assert length == len(found)
        assert found[-1] == {"error": {"code": 500, "message": "broke off", "status": "INTERNAL"}}
    empty = GEMINI.renderer(SSE, IDENTITY).finish(None)
    assert events_of(empty)[0]["error"]["message"] == "The engine's response ended before it began."


def test_a_response_without_choices_is_an_empty_candidate():
    """It was aborted at its beginning."""
    response = whole({"choices": [], "usage": None})

    assert (
        response["candidates"][0]["content"]["parts"],
        response["candidates"][0]["finishReason"],
    ) == ([{"text": ""}], "OTHER")
    assert "usageMetadata" not in response
    assert SimpleNamespace(**GEMINI.renderer({}, IDENTITY).stream_format._asdict()).content_type.startswith(
        "application/json"
    )
