"""Responses, unstreamed and streamed, as the official SDK reads them and the next request returns them; stop reasons."""

import orjson
import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.anthropic_events import (
    accumulated,
    atoms,
    chunks_of,
    events_of,
    folded,
    messages,
    plain,
    response_of,
    sampled_calls,
    sent_back,
)
from tests.support.each_cassette import of_each
from tests.support.recorded import dialect_cassettes, http_cassettes

from proxy.protocols.dialects.base import CallIdentity, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.messages import MESSAGES, stop_reason_from, usage_from
from proxy.protocols.dialects.translation import call_ids

IDENTITY = CallIdentity("01a9", 1795229441, "claude-sonnet")
BODY = {"model": "claude-sonnet", "max_tokens": 9, "messages": [], "stop_sequences": ["END"]}
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def renderer():
    return MESSAGES.renderer(BODY, IDENTITY)


def whole(response):
    return renderer().whole(response)


def streamed(chunks, response=None, error=None) -> bytes:
    rendered = renderer()
    return b"".join(rendered.feed(chunk) for chunk in chunks) + rendered.finish(response or folded(chunks), error)


def sampled(message) -> dict:
    """Return the chat message as a chat client would return it, with the tool call ids that were rendered."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    rendered = {"role": "assistant", "content": message["content"]} | ({"reasoning": thought} if thought else {})
    calls = message.get("tool_calls") or []
    named = [call | {"id": choose_call_id} for call, choose_call_id in zip(calls, call_ids(calls, "01a9"), strict=True)]
    return rendered | ({"tool_calls": named} if named else {})


def read_again(message, response) -> dict:
    """Return the chat message that is read from a response that the SDK returns."""
    resolved = ResolvedReferences(calls=sampled_calls(message, "01a9"))
    return MESSAGES.read({"messages": sent_back(response)}, TranslationOptions(), resolved)["messages"][1]


@settings(max_examples=30)
@given(messages())
def test_an_unstreamed_response_is_read_back_as_the_sampled_message(message):
    """Byte for byte: ids, arguments, reasoning, and whether there was any text."""
    response = whole(response_of(message))

    assert orjson.dumps(sampled(message)) == orjson.dumps(read_again(message, response))
    assert plain(response) == plain(Message.model_validate(response, strict=True))


@settings(max_examples=30)
@given(messages(), SIZES, SIZES, st.booleans())
def test_a_stream_accumulates_to_the_unstreamed_response(message, sizes, others, apart):
    """By the SDK's accumulation, for any chunking; a delta may contain reasoning, text, calls and the finish at once."""
    response = response_of(message, stop_reason=None)
    chunks = chunks_of(atoms(message), sizes, response, apart=apart)
    other = chunks_of(atoms(message), others, response, apart=not apart)

    answer = accumulated(streamed(chunks))

    assert plain(whole(folded(chunks))) == plain(answer) == plain(accumulated(streamed(other)))
    assert orjson.dumps(sampled(folded(chunks)["choices"][0]["message"])) == orjson.dumps(read_again(message, answer))


@settings(max_examples=25)
@given(messages(), st.randoms(use_true_random=False), SIZES)
def test_the_order_of_deltas_does_not_change_the_message_that_is_read_back(message, random, sizes):
    """Text after calls, reasoning after text, interleaved calls: blocks keep the order in which they began."""
    queues = {}
    for atom in atoms(message):
        key = (atom[0], atom[1]["index"]) if atom[0] == "tool_calls" else atom[0]
        queues.setdefault(key, []).append(atom)
    calls = sorted(key for key in queues if isinstance(key, tuple))
    opened = [queues[key].pop(0) for key in calls]  # calls are opened in their order
    mixed = []
    while any(queues.values()):
        mixed.append(queues[random.choice([key for key, queue in queues.items() if queue])].pop(0))
    chunks = chunks_of(opened + mixed, sizes, response_of(message), apart=True)

    response = accumulated(streamed(chunks))

    assert orjson.dumps(sampled(folded(chunks)["choices"][0]["message"])) == orjson.dumps(read_again(message, response))


def test_a_block_is_closed_when_the_next_begins():
    """A ping follows message_start; the events of the end are sent by finish()."""
    message = {"content": "Hi", "reasoning": "Hm", "tool_calls": [CALL]}
    response = response_of(message)
    chunks = chunks_of(atoms(message), [2, 2, 1, 4, 99], response, apart=True)
    chunks[0]["usage"] = {"prompt_tokens": 33, "completion_tokens": 0}
    rendered = renderer()

    fed = [[event["type"] for event in events_of(rendered.feed(chunk))] for chunk in chunks]
    ended = events_of(rendered.finish(response))

    assert fed == [
        ["message_start", "ping"],
        ["content_block_start", "content_block_delta"],
        ["content_block_delta", "content_block_stop", "content_block_start", "content_block_delta"],
        ["content_block_stop", "content_block_start"],
        ["content_block_delta"],
        ["content_block_delta"],
        [],
        [],
    ]
    assert [event["type"] for event in ended] == ["content_block_stop", "message_delta", "message_stop"]
    assert ended[1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}
    assert ended[1]["usage"]["output_tokens"] == 5


def test_what_follows_a_call_is_sent_at_the_end():
    """Claude Code runs a tool as soon as its block ends: a call's block ends in finish(). One block is open at a time."""
    texts = [{"content": "a"}, {"reasoning": "b"}]
    calls = [
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 1, "id": "d", "function": {"name": "g", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}, {"index": 1, "function": {"arguments": ":1}"}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in [*calls, *texts]]
    rendered = renderer()

    fed = [[event["type"] for event in events_of(rendered.feed(chunk))] for chunk in chunks]
    ended = events_of(rendered.finish(folded(chunks)))

    block = ["content_block_start", "content_block_delta"]
    assert fed == [["message_start", "ping", *block], [], ["content_block_delta"], [], []]
    end = ["content_block_delta", "content_block_stop", *block, "content_block_stop", *block, "content_block_delta"]
    assert [event["type"] for event in ended] == [
        "content_block_stop",
        *block,
        *end,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in ended if "index" in event] == [0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_message_start_has_the_input_tokens_of_the_first_chunk():
    """If the first chunk has none, message_delta has them, and the SDK uses those."""
    chunk = {"choices": [], "usage": {"prompt_tokens": 33, "prompt_tokens_details": {"cached_tokens": 30}}}

    begun = events_of(renderer().feed(chunk))[0]["message"]
    silent = accumulated(streamed([{"choices": []}], response_of({"content": "x"})))

    assert begun["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 30,
        "output_tokens": 0,
    }
    assert tuple(begun[key] for key in ("id", "model", "content", "stop_reason")) == (
        "msg_01a9",
        "claude-sonnet",
        [],
        None,
    )
    assert (silent.usage.input_tokens, silent.usage.output_tokens) == (33, 5)


def test_argument_deltas_are_forwarded_one_by_one():
    """Not one character is changed, joined or delayed."""
    pieces = ['{"ci', 'ty": "', "P", 'aris"', "}"]
    rendered = renderer()
    rendered.feed(_piece(id="c1", type="function", function={"name": "f", "arguments": ""}))

    events = [events_of(rendered.feed(_piece(function={"arguments": piece}))) for piece in pieces]

    assert pieces == [event["delta"]["partial_json"] for (event,) in events]


def test_a_tool_call_is_sent_when_its_name_is_known():
    """With the arguments so far; a call without a name is sent by finish()."""
    rendered = renderer()
    rendered.feed({"choices": []})

    assert events_of(rendered.feed(_piece(id="c1", function={"arguments": '{"a"'}))) == []
    named = events_of(rendered.feed(_piece(function={"name": "f", "arguments": ":1}"})))
    assert named[0]["content_block"] == {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    assert named[1]["delta"]["partial_json"] == '{"a":1}'
    assert events_of(rendered.feed(_piece(index=1, function={"arguments": "{}"}))) == []
    ended = events_of(rendered.finish(response_of({"content": None, "tool_calls": [CALL, CALL]})))
    assert ended[1]["content_block"] == {"type": "tool_use", "id": "toolu_01a9_1", "name": "", "input": {}}


def test_invalid_arguments_do_not_break_the_sdk():
    """Only their valid prefix is sent; the SDK would raise otherwise."""
    message = {"content": None, "tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"a": "two\nlines"}'}}]}
    chunks = chunks_of(atoms(message), [3], response_of(message), apart=True)

    assert accumulated(streamed(chunks)).content[0].input == whole(response_of(message))["content"][0]["input"] == {}
    assert message["tool_calls"] == read_again(message, whole(response_of(message)))["tool_calls"]


@pytest.mark.parametrize(
    ("content", "blocks"), [("", [{"type": "text", "text": ""}]), (None, []), ("x", [{"type": "text", "text": "x"}])]
)
def test_an_empty_text_has_a_block_and_null_content_has_none(content, blocks):
    """Unstreamed, and in a stream if its response has it."""
    response = response_of({"content": content})

    assert whole(response)["content"] == blocks
    if content != "x":
        assert plain(accumulated(streamed([{"choices": []}], response)))["content"] == blocks


def test_other_choices_are_not_sent():
    """The Messages API has one choice."""
    rendered = renderer()
    rendered.feed({"choices": []})

    assert rendered.feed({"choices": [{"index": 1, "delta": {"content": "x"}}]}) == b""


def test_an_engines_error_ends_the_stream_with_one_error_event():
    """Before or after the first block."""
    begun = renderer()
    begun.feed({"choices": [{"index": 0, "delta": {"content": "x"}}]})

    (event,) = events_of(begun.finish(None, '{"error":{"message":"out of memory","code":500}}'))
    (other,) = events_of(renderer().finish(None))

    assert event == {"type": "error", "error": {"type": "api_error", "message": "out of memory"}}
    assert other["error"]["message"] == "the engine's response ended before it began"


def test_an_interrupted_stream_ends_with_an_error_event():
    """Even if the accumulated response looks complete."""
    (event,) = events_of(renderer().finish(response_of({"content": "x"}), "the engine broke off"))

    assert event["error"]["message"] == "the engine broke off"


def test_rendering_is_deterministic():
    """A response depends only on the request body, the step and the sampled message."""
    message = {"content": "Hi", "reasoning": "Hm", "tool_calls": [CALL | {"id": None}]}
    chunks = chunks_of(atoms(message), [2], response_of(message), apart=True)

    assert streamed(chunks) == streamed(chunks)
    assert orjson.dumps(whole(response_of(message))) == orjson.dumps(whole(response_of(message)))


RECORDED = [
    cassette
    for cassette in [*dialect_cassettes(), *dialect_cassettes("sglang"), *http_cassettes("llamacpp")]
    if cassette.status == 200 and cassette.path.endswith("/chat/completions")
]


def payloads(stream: bytes) -> list[dict]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


def in_order(answer: dict) -> dict:
    """Return a message with one text in the place of all, and the calls last: SGLang streams spaces after calls."""
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    kept = [block for block in answer["content"] if block["type"] != "text"]
    return {**answer, "content": [text, *kept]}


@of_each(item for item in RECORDED if item.is_stream)
def test_recorded_streams_of_every_engine_are_rendered(cassette):
    """They accumulate to the unstreamed response, which is read back as the sampled message."""
    chunks = payloads(cassette.response)
    if any("error" in chunk for chunk in chunks):
        assert events_of(streamed([], None, orjson.dumps(chunks[0]).decode()))[-1]["type"] == "error"
        return
    response = folded(chunks)
    message = (response["choices"] or [{"message": {"content": None}}])[0]["message"]

    answer = accumulated(streamed(chunks))

    assert in_order(plain(whole(response))) == in_order(plain(answer))
    assert orjson.dumps(sampled(message)) == orjson.dumps(read_again(message, answer))


@of_each(item for item in RECORDED if not item.is_stream)
def test_recorded_responses_of_every_engine_are_rendered(cassette):
    """They are read back as the sampled message."""
    response = orjson.loads(cassette.response)
    message = response["choices"][0]["message"]

    answer = whole(response)

    assert plain(answer) == plain(Message.model_validate(answer, strict=True))
    read = read_again(message, answer)
    for call in sampled(message).get("tool_calls", []):
        assert call["function"] in [read_call["function"] for read_call in read["tool_calls"]]
    assert sampled(message)["content"] == read["content"]
    assert (message.get("reasoning") or message.get("reasoning_content")) == read.get("reasoning")


def _piece(**call) -> dict:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}}]}


CALLS = {"tool_calls": [{"id": "c"}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": 4089}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "matched_stop": 2}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "of the rollout's terms"}, ("end_turn", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "length", "message": CALLS}, ("max_tokens", None)),
        ({"finish_reason": "tool_calls", "message": CALLS}, ("tool_use", None)),
        ({"finish_reason": "stop", "message": CALLS}, ("tool_use", None)),
        ({"finish_reason": "tool_calls", "message": {}}, ("end_turn", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
        ({"finish_reason": "abort"}, ("pause_turn", None)),
        ({"finish_reason": None}, ("pause_turn", None)),
        ({}, ("pause_turn", None)),
        ({"finish_reason": "repetition", "stop_reason": "repetition_detected"}, ("max_tokens", None)),
        ({"finish_reason": "something new"}, ("end_turn", None)),
    ],
)
def test_a_finish_reason_becomes_a_stop_reason(choice, expected):
    """vLLM finishes a forced tool call with `stop`; a stop string is returned if the client sent it."""
    assert stop_reason_from(choice, ["END"]) == expected


@pytest.mark.parametrize("stops", [None, [], "END", {"END": 1}])
def test_a_stop_string_that_the_client_did_not_send_is_not_returned(stops):
    """Nor if `stop_sequences` has another type."""
    assert stop_reason_from({"finish_reason": "stop", "stop_reason": "END"}, stops) == ("end_turn", None)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, (0, 0, 0, None)),
        ({"prompt_tokens": 33, "completion_tokens": 5, "prompt_tokens_details": None}, (33, 0, 5, None)),
        (
            {"prompt_tokens": 33, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 24}},
            (9, 24, 5, None),
        ),
        (
            {"prompt_tokens": 3, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 4}},
            (3, 0, 5, 4),
        ),
        ({"prompt_tokens": 3, "completion_tokens": 5, "reasoning_tokens": 0}, (3, 0, 5, 0)),
        ({"prompt_tokens": "3", "completion_tokens": True, "prompt_tokens_details": 7}, (0, 0, 0, None)),
    ],
)
def test_cached_tokens_are_counted_apart_from_input_tokens(usage, expected):
    """Their sum is the number of prompt tokens."""
    counts = usage_from(usage)
    thinking_tokens = counts.get("output_tokens_details", {}).get("thinking_tokens")

    assert (
        counts["input_tokens"],
        counts["cache_read_input_tokens"],
        counts["output_tokens"],
        thinking_tokens,
    ) == expected
