"""Content blocks and events of the Messages API."""

from anthropic.types import Message

from proxy.protocols.dialects.base import CallIdentity
from proxy.protocols.dialects.messages import renderer as shapes

IDENTITY = CallIdentity("01a9", 1795229441, "claude-sonnet")


def test_a_message_id_is_that_of_its_step():
    """The model is the requested one; the SDK reads the message."""
    usage = {"input_tokens": 1, "output_tokens": 2}
    blocks = [
        shapes.thinking("t", "s"),
        shapes.text("a"),
        shapes.tool_use("c", "f", {"a": 1}),
    ]

    message = Message.model_validate(shapes.message(IDENTITY, blocks, usage, "tool_use", None))

    assert ("msg_01a9", "claude-sonnet", "s") == (message.id, message.model, message.content[0].signature)
    assert ["thinking", "text", "tool_use"] == [block.type for block in message.content]
