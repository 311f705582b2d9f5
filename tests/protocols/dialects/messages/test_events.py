"""The shapes of blocks and events."""

from anthropic.types import Message

from proxy.protocols.dialects.messages import events as shapes
from proxy.protocols.dialects.translation import CallIdentity

TOLD = CallIdentity("01a9", 1795229441, "claude-sonnet")


def test_an_answer_is_named_by_its_step():
    """And by the model as it was asked for; the SDK reads it."""
    usage = {"input_tokens": 1, "output_tokens": 2}
    blocks = [shapes.thinking("t", shapes.signature_for(TOLD)), shapes.text("a"), shapes.tool_use("c", "f", {"a": 1})]

    message = Message.model_validate(shapes.message(TOLD, blocks, usage, "tool_use", None))

    assert ("msg_01a9", "claude-sonnet", "sig_01a9") == (message.id, message.model, message.content[0].signature)
    assert ["thinking", "text", "tool_use"] == [block.type for block in message.content]


def test_an_event_is_named_twice():
    """In its line and in its JSON."""
    assert b'event: message_stop\ndata: {"type":"message_stop"}\n\n' == shapes.event("message_stop")
    assert b'event: x\ndata: {"type":"x","index":1}\n\n' == shapes.event("x", index=1)
