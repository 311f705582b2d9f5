"""Content blocks and events of the Messages API."""

from anthropic.types import Message

from proxy.protocols.dialects.messages import renderer as shapes
from proxy.protocols.dialects.translation import CallIdentity

IDENTITY = CallIdentity("01a9", 1795229441, "claude-sonnet")


def test_a_message_id_is_that_of_its_step():
    """The model is the requested one; the SDK reads the message."""
    usage = {"input_tokens": 1, "output_tokens": 2}
    blocks = [
        shapes.thinking("t", shapes.signature_for(IDENTITY)),
        shapes.text("a"),
        shapes.tool_use("c", "f", {"a": 1}),
    ]

    message = Message.model_validate(shapes.message(IDENTITY, blocks, usage, "tool_use", None))

    assert ("msg_01a9", "claude-sonnet", "sig_01a9") == (message.id, message.model, message.content[0].signature)
    assert ["thinking", "text", "tool_use"] == [block.type for block in message.content]


def test_an_event_has_its_type_in_the_event_line_and_in_its_data():
    assert b'event: message_stop\ndata: {"type":"message_stop"}\n\n' == shapes.event("message_stop")
    assert b'event: x\ndata: {"type":"x","index":1}\n\n' == shapes.event("x", index=1)
