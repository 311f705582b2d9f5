"""Earlier responses, items and calls that a request references by id."""

import pytest
from hypothesis import given, settings
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from tests.support.forests import make_step
from tests.support.responses_drawn import BODY, IDENTITY, as_chat, messages, response_of

from proxy.protocols.dialects.base import References, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.responses import RESPONSES, input_items, resolve_references, response_object
from proxy.trajectory.step import Step

FIRST = IDENTITY.step_id
LATER = FIRST[:-1] + "W"


def call(step_id: str, body: dict, response: dict, sent: list | None = None) -> Step:
    """Return a recorded call of the dialect; `sent` are its chat messages."""
    fields = {"set": {"messages": sent or []}, "unset": []}
    return make_step(step_id, [], dialect="responses", request=body, response=response, sent=fields)


def after(*calls):
    """Resolve the references of a request to the last of these calls; each references the one before it."""
    resolved = ResolvedReferences()
    for step_id, body, response in calls:
        sent = RESPONSES.read(body, TranslationOptions(), resolved)["messages"]
        resolved = resolve_references(call(step_id, body, response, sent), [], {})
    return resolved


@settings(max_examples=30)
@given(message=messages(), second=messages())
def test_previous_response_id_equals_sending_all_items_back(message, second):
    first = FIRST, {**BODY, "instructions": "not carried on"}, response_of(message)
    then = {"type": "function_call_output", "call_id": "c", "output": "o"}
    later = LATER, {**BODY, "input": [then]}, response_of(second)
    resolved = after(first, later)
    chat = RESPONSES.read({"instructions": "i", "input": "next"}, TranslationOptions(), resolved)

    assert [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "hi"},
        as_chat(message),
        {"role": "tool", "tool_call_id": "c", "content": "o"},
        as_chat(second),
        {"role": "user", "content": "next"},
    ] == chat["messages"]


@pytest.mark.parametrize("has_developers", [True, False])
def test_only_instructions_are_not_carried_over(has_developers):
    """Developer messages are, whether they were sent as such or merged into the system message."""
    options = TranslationOptions(has_developers=has_developers)
    body = {"instructions": "old", "input": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]}
    sent = RESPONSES.read(body, options)["messages"]
    before = call(FIRST, body, response_of({"role": "assistant", "content": "a"}), sent)
    resolved = resolve_references(before, [], {})
    chat = RESPONSES.read({"instructions": "new", "input": "next"}, options, resolved)

    expected = [("system", "new"), ("developer", "d")] if has_developers else [("system", "new\n\nd")]
    assert [(message["role"], message["content"]) for message in chat["messages"]] == [
        *expected,
        ("user", "u"),
        ("assistant", "a"),
        ("user", "next"),
    ]


@settings(max_examples=30)
@given(message=messages())
def test_item_references_read_as_the_items_themselves(message):
    """References to all output items of a response; input items can be referenced too."""
    turn = call(FIRST, {**BODY, "input": [{"role": "user", "content": "u"}]}, response_of(message))
    names = [f"in_{FIRST}_0", *(item["id"] for item in response_object(turn)["output"])]
    body = {"input": [{"type": "item_reference", "id": names[0]}, *({"id": name} for name in names[1:])]}
    calls = {call["id"]: call["function"] for call in message.get("tool_calls", ())}
    chat = RESPONSES.read(body, TranslationOptions(), resolve_references(None, [turn], calls))

    assert names == RESPONSES.references(body).items
    assert [{"role": "user", "content": "u"}, as_chat(message)] == chat["messages"]


def test_a_referenced_reasoning_item_has_the_recorded_text():
    """LangChain returns reasoning items with their id and without text."""
    first = call(FIRST, BODY, response_of({"role": "assistant", "content": "a", "reasoning": "hm"}))
    empty = {"type": "reasoning", "id": f"rs_{FIRST}_0", "summary": []}
    later = call(LATER, {"input": [empty]}, response_of({"role": "assistant", "content": "b"}))
    resolved = resolve_references(None, [first, later], {})

    assert RESPONSES.read({"input": [empty]}, TranslationOptions(), resolved)["messages"][0]["reasoning"] == "hm"


def test_input_items_have_ids_and_the_sdks_types():
    """An item keeps its id; a string becomes a text part."""
    items = [
        {"role": "user", "content": "u"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "o", "status": "completed"},
    ]
    whole, text = (input_items(call(FIRST, {"input": value}, {})) for value in (items, "hi"))

    assert [item["id"] for item in whole] == [f"in_{FIRST}_0", "fc_1", f"in_{FIRST}_2"]
    assert text[0]["content"] == [{"type": "input_text", "text": "hi"}]
    for item in [*whole, *text]:
        TypeAdapter(ResponseItem).validate_python(item)
    assistant = input_items(call(FIRST, {"input": [{"role": "assistant", "content": "a"}]}, {}))
    assert assistant[0]["content"][0]["type"] == "output_text"


def test_references_are_read_from_any_body():
    """Invalid bodies have none."""
    calls = [
        {"type": "custom_tool_call", "call_id": "p"},
        {"type": "function_call", "call_id": "c"},
        {"type": "item_reference"},
    ]

    assert References(None, [], ["p", "c"]) == RESPONSES.references(
        {"input": [*calls, 1, {"id": 7}], "previous_response_id": 7}
    )
    assert References(None, [], []) == RESPONSES.references({"input": "hi"})


def test_tool_call_ids_that_the_engine_omitted_come_from_the_response():
    """Tool outputs then match their call."""
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "", "function": {"name": "f", "arguments": ""}}],
    }
    (sampled,) = after((FIRST, BODY, response_of(message))).messages[-1]["tool_calls"]
    shown = response_object(call(FIRST, BODY, response_of(message)))["output"][0]

    assert shown["call_id"] == sampled["id"] == f"call_{FIRST}_0"
