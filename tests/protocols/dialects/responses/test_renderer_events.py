"""Events of the Responses API, and the output items that they build."""

from tests.support.responses_drawn import events_of

from proxy.protocols.dialects.responses.renderer import CallItem, Events, TextItem
from proxy.protocols.dialects.responses.tools import Tool


def event_types(stream):
    return [event["type"].removeprefix("response.") for event in events_of(stream)]


def test_events_are_numbered_from_zero():
    events = Events()

    assert b'event: a\ndata: {"type":"a","sequence_number":0,"x":1}\n\n' == events.write("a", x=1)
    assert b'"sequence_number":1' in events.write("b")


def test_a_text_items_events_are_in_the_apis_order():
    """An empty delta adds the part and sends no delta event."""
    item = TextItem(Events(), "msg_1", 3, {"type": "message", "role": "assistant"})
    events = events_of(
        item.begin() + item.append("output_text", "") + item.append("output_text", "a") + item.end("completed")
    )

    assert [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
    ] == [event["type"].removeprefix("response.") for event in events]  # fmt: skip
    assert {3} == {event["output_index"] for event in events}
    assert ("a", "msg_1", "completed") == (
        events[-1]["item"]["content"][0]["text"],
        events[-1]["item"]["id"],
        events[-1]["item"]["status"],
    )


def test_text_and_refusal_are_parts_with_their_own_index():
    """Reasoning has no logprobs; a refusal is not output text."""
    item = TextItem(Events(), "msg_1", 0, {})
    text, refusal = events_of(item.append("output_text", "a"))[1], events_of(item.append("refusal", "b"))[1]

    assert (0, "a", []) == (text["content_index"], text["delta"], text["logprobs"])
    assert (1, "b", False) == (refusal["content_index"], refusal["delta"], "logprobs" in refusal)
    assert ("a", "b", "") == (item.text_of("output_text"), item.text_of("refusal"), item.text_of("reasoning_text"))


def test_argument_deltas_are_forwarded_as_sampled():
    """Valid JSON or not."""
    item = CallItem(Events(), "fc_1", 0, Tool("crm__f", "function", "f", "crm"), "c")
    events = events_of(item.begin() + item.append("{ ") + item.append("") + item.append("x") + item.end("completed"))

    assert ["{ ", "x"] == [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert "{ x" == events[-2]["arguments"]
    assert {
        "id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "namespace": "crm", "arguments": "{ x",
        "status": "completed",
    } == events[-1]["item"]  # fmt: skip


def test_the_input_of_a_custom_tool_is_streamed_without_its_json_quoting():
    """A delta never ends within an escape; arguments without an `input` string are sent when the item ends."""

    def item():
        return CallItem(Events(), "ctc_1", 0, Tool("p", "custom", "p"), "c")

    valid, invalid = item(), item()
    assert [[], ["a"], ["\n"]] == [
        [event["delta"] for event in events_of(valid.append(piece))] for piece in ('{"input": "', "a\\", 'n"}')
    ]
    assert ["custom_tool_call_input.done", "output_item.done"] == event_types(valid.end("completed"))
    assert b"" == invalid.append("{}")
    assert ["custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"] == event_types(
        invalid.end("completed")
    )
    assert {"id": "ctc_1", "type": "custom_tool_call", "call_id": "c", "name": "p", "input": "{}"} == invalid.to_json(
        "completed"
    )
