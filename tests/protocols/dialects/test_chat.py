"""OpenAI's chat completions."""

from proxy.errors import NotFound
from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.dialects.chat import Chat


def test_response_options_are_read_from_a_chat_request():
    options = Chat().response_options({"n": 2, "logprobs": True, "stream_options": {"include_usage": True}})

    assert (False, True, True, 2, 2) == (
        options.token_ids,
        options.logprobs,
        options.usage,
        options.samples,
        options.choices,
    )
    assert isinstance(Chat().accumulator(), ChatAccumulator)
    assert b'"type":"not_found_error"' in Chat().error(NotFound("x"))
