"""Events and the items that they tell of."""

from responses_drawn import events_of

from proxy.protocols.dialects.responses.events import CallItem, Events, TextItem
from proxy.protocols.dialects.responses.tools import Tool


def kinds_of(stream):
    return [event["type"].removeprefix("response.") for event in events_of(stream)]


def test_events_are_numbered_from_nought():
    """Of whatever kind."""
    events = Events()

    assert b'event: a\ndata: {"type":"a","sequence_number":0,"x":1}\n\n' == events.write("a", x=1)
    assert b'"sequence_number":1' in events.write("b")


def test_a_text_begins_with_its_first_piece_and_ends_with_its_item():
    """An empty piece begins it and says nothing."""
    item = TextItem(Events(), "msg_1", 3, {"type": "message", "role": "assistant"})
    told = events_of(
        item.begin() + item.append("output_text", "") + item.append("output_text", "a") + item.end("completed")
    )

    assert [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
    ] == [event["type"].removeprefix("response.") for event in told]  # fmt: skip
    assert {3} == {event["output_index"] for event in told}
    assert ("a", "msg_1", "completed") == (
        told[-1]["item"]["content"][0]["text"],
        told[-1]["item"]["id"],
        told[-1]["item"]["status"],
    )


def test_parts_are_told_apart_by_their_index():
    """Thoughts have no logprobs, and a refusal is no text."""
    item = TextItem(Events(), "msg_1", 0, {})
    text, refusal = events_of(item.append("output_text", "a"))[1], events_of(item.append("refusal", "b"))[1]

    assert (0, "a", []) == (text["content_index"], text["delta"], text["logprobs"])
    assert (1, "b", False) == (refusal["content_index"], refusal["delta"], "logprobs" in refusal)
    assert ("a", "b", "") == (item.text_of("output_text"), item.text_of("refusal"), item.text_of("reasoning_text"))


def test_argument_text_is_told_as_it_was_sampled():
    """Piece by piece, whatever it says."""
    item = CallItem(Events(), "fc_1", 0, Tool("crm__f", "function", "f", "crm"), "c")
    told = events_of(item.begin() + item.append("{ ") + item.append("") + item.append("x") + item.end("completed"))

    assert ["{ ", "x"] == [event["delta"] for event in told if event["type"].endswith(".delta")]
    assert "{ x" == told[-2]["arguments"]
    assert {
        "id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "namespace": "crm", "arguments": "{ x",
        "status": "completed",
    } == told[-1]["item"]  # fmt: skip


def test_the_input_of_a_custom_tool_is_told_as_it_is_known():
    """Not before the string begins, nor in the middle of an escape; what is no input comes at the end."""

    def item():
        return CallItem(Events(), "ctc_1", 0, Tool("p", "custom", "p"), "c")

    good, bad = item(), item()
    assert [[], ["a"], ["\n"]] == [
        [event["delta"] for event in events_of(good.append(piece))] for piece in ('{"input": "', "a\\", 'n"}')
    ]
    assert ["custom_tool_call_input.done", "output_item.done"] == kinds_of(good.end("completed"))
    assert b"" == bad.append("{}")
    assert ["custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"] == kinds_of(
        bad.end("completed")
    )
    assert {"id": "ctc_1", "type": "custom_tool_call", "call_id": "c", "name": "p", "input": "{}"} == bad.to_json(
        "completed"
    )
