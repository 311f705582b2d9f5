"""OpenAI's chat completions."""

from proxy.dialects.chat import Chat
from proxy.errors import NotFound
from proxy.wire.fold import ChatFold


def test_what_a_chat_client_asks_to_see():
    """Flags, and as many choices as n."""
    asked = Chat().asked({"n": 2, "logprobs": True, "stream_options": {"include_usage": True}})

    assert (False, True, True, 2, 2) == (asked.token_ids, asked.logprobs, asked.usage, asked.samples, asked.choices)
    assert isinstance(Chat().fold(), ChatFold)
    assert b'"type":"not_found_error"' in Chat().error(NotFound("x"))
