"""OpenAI's chat completions."""

from proxy.errors import NotFound
from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.dialects.chat import Chat


def test_what_a_chat_client_asks_to_see():
    """Flags, and as many choices as n."""
    asked = Chat().response_options({"n": 2, "logprobs": True, "stream_options": {"include_usage": True}})

    assert (False, True, True, 2, 2) == (asked.token_ids, asked.logprobs, asked.usage, asked.samples, asked.choices)
    assert isinstance(Chat().accumulator(), ChatAccumulator)
    assert b'"type":"not_found_error"' in Chat().error(NotFound("x"))
