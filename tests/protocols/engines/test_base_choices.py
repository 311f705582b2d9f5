"""The fields of an OpenAI-shaped choice that all engines read in the same way."""

import pytest

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import StripRules, index_of, logprobs_of, without


@pytest.mark.parametrize("index", ["0", None, 1.0, True])
def test_a_choice_index_that_is_not_an_integer_raises_type_error(index):
    with pytest.raises(TypeError, match="index"):
        index_of({"index": index})


@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_rejects_a_choice_index_that_is_not_an_integer(kind):
    with pytest.raises(TypeError, match="index"):
        ENGINES[kind].tokens("chat", {}, {"choices": [{"index": "0"}]})


@pytest.mark.parametrize(
    ("logprobs", "read"),
    [
        (None, None),
        ({"content": [{"logprob": -1.0}, {"token": "a"}]}, [-1.0, None]),
        ({"content": None, "token_logprobs": [None, -2.0]}, [None, -2.0]),
        ({}, None),
    ],
)
def test_logprobs_are_read_from_chat_and_completions_choices(logprobs, read):
    """One per token; a missing one is None."""
    assert read == logprobs_of({"logprobs": logprobs})


def test_stripping_removes_keys_and_nulls_logprobs_in_a_copy():
    choice = {"index": 0, "logprobs": {}, "token_ids": [1], "text": "a"}
    shown = without(choice, StripRules(logprobs=True, keys=frozenset({"token_ids"})))

    assert {"index": 0, "logprobs": None, "text": "a"} == shown
    assert {"index": 0, "logprobs": {}, "token_ids": [1], "text": "a"} == choice
