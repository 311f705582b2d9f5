"""OpenAI's chat completions and legacy completions."""

import pytest

from proxy.errors import NotFound
from proxy.protocols.accumulators import ChatAccumulator, CompletionsAccumulator
from proxy.protocols.dialects.base import ResponseOptions
from proxy.protocols.dialects.openai import Chat, Completions, prompt_count


def test_response_options_are_read_from_a_chat_request():
    options = Chat().response_options({"n": 2, "logprobs": True, "stream_options": {"include_usage": True}})

    assert options == ResponseOptions(False, True, True, 2, 2)
    assert isinstance(Chat().accumulator(), ChatAccumulator)
    assert b'"type":"not_found_error"' in Chat().error(NotFound("x"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), ([], None), (None, None), (7, None)],
)
def test_prompts_are_counted(prompt, expected):
    """A prompt is a text, a list of token ids, or a list of either."""
    assert prompt_count({"prompt": prompt}) == expected


def test_zero_logprobs_request_the_sampled_tokens_logprob():
    """In completions, `logprobs` is the number of alternatives."""
    dialect = Completions()

    assert dialect.response_options({"prompt": "a", "logprobs": 0}).logprobs
    assert not dialect.response_options({"prompt": "a"}).logprobs
    assert dialect.response_options({"prompt": ["a", "b"], "n": 3}).choices == 6
    assert dialect.response_options({"prompt": ["a", "b"], "n": "3"}).choices is None
    assert isinstance(dialect.accumulator(), CompletionsAccumulator)
    assert b'"type":"not_found_error"' in dialect.error(NotFound("x"))
