"""Messages in the form of OpenTelemetry's GenAI conventions."""

from dataclasses import replace

import orjson
from hypothesis import given
from tests.support.any_json import odd_steps
from tests.support.recorded import load, plan_of, play

from proxy.telemetry.span_attributes import (
    MAX_BYTES,
    MAX_TEXT,
    clean,
    input_messages,
    output_messages,
    tool_definitions,
)

CHAT = "/v1/chat/completions"
_, _, STEP = play(plan_of(CHAT, {"model": "tiny", "messages": []}), load("chat_ids_lp"))


def inputs(*messages, **fields):
    text, omitted = input_messages(replace(STEP, request={"messages": list(messages), **fields}, sent={}))
    return (None if text is None else orjson.loads(text)), omitted


def test_texts_tool_calls_and_their_results_are_parts():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
    messages, omitted = inputs(
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://i"}}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    )

    assert 0 == omitted
    assert [
        {"role": "system", "parts": [{"type": "text", "content": "be kind"}]},
        {
            "role": "user",
            "parts": [{"type": "text", "content": "see"}, {"type": "uri", "modality": "image", "uri": "http://i"}],
        },
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "x"}},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "found"}]},
    ] == messages


def test_the_prompt_of_a_completion_is_a_message_of_the_user():
    step = replace(
        STEP,
        dialect="completions",
        request={"prompt": ["a", "b", [1, 2]]},
        sent={},
        response={"choices": [{"text": "c"}]},
    )

    assert ["a", "b"] == [message["parts"][0]["content"] for message in orjson.loads(input_messages(step)[0])]
    assert [{"role": "assistant", "parts": [{"type": "text", "content": "c"}]}] == orjson.loads(output_messages(step))


def test_arguments_that_are_no_json_are_text():
    call = {"function": {"name": "f", "arguments": "{cut"}}
    messages, _ = inputs({"role": "assistant", "tool_calls": [call, {"function": None}, 3]})

    assert [{"type": "tool_call", "id": None, "name": "f", "arguments": "{cut"}] == messages[0]["parts"]


def test_tools_are_defined_by_name_description_and_parameters():
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "strict": True}}, "odd"]
    step = replace(STEP, request={"messages": [], "tools": tools}, sent={})

    assert [{"type": "function", "name": "f", "description": "d"}] == orjson.loads(tool_definitions(step))
    assert tool_definitions(replace(STEP, request={"messages": []}, sent={})) is None
    long = [{"function": {"name": "f", "description": "d" * MAX_BYTES}}]
    assert tool_definitions(replace(STEP, request={"tools": long}, sent={})) is None


def test_the_newest_messages_are_kept_and_the_number_of_the_others_is_returned():
    messages, omitted = inputs(*({"role": "user", "content": f"{number}" + "x" * 10_000} for number in range(20)))

    assert 20 == len(messages) + omitted
    assert 6 == len(messages)
    assert messages[-1]["parts"][0]["content"].startswith("19x")


def test_a_long_text_is_cut():
    messages, _ = inputs({"role": "user", "content": "x" * 10**6})

    assert MAX_TEXT == len(messages[0]["parts"][0]["content"])
    assert messages[0]["parts"][0]["content"].endswith("x…")


def test_an_image_in_the_request_is_not_exported():
    messages, _ = inputs(
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}}]}
    )

    assert 256 == len(messages[0]["parts"][0]["uri"])


def test_a_surrogate_is_replaced():
    assert "a?b" == clean("a\ud800b")


@given(odd_steps())
def test_messages_of_any_type_are_valid_json_of_limited_size(steps):
    for step in steps:
        for text in (input_messages(step)[0], output_messages(step), tool_definitions(step)):
            assert text is None or len(text.encode()) <= 2 * MAX_BYTES + 1024
            assert text is None or isinstance(orjson.loads(text), list)
