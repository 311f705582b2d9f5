"""A choice of an OpenAI-shaped answer: the readings that engines share."""

import pytest

from proxy.protocols.engines.base import StripRules, index_of, logprobs_of, without


@pytest.mark.parametrize("index", ["0", None, 1.0, True])
def test_an_index_is_an_integer(index):
    """Nothing could be paired by anything else."""
    with pytest.raises(TypeError, match="index"):
        index_of({"index": index})


@pytest.mark.parametrize(
    ("logprobs", "read"),
    [
        (None, None),
        ({"content": [{"logprob": -1.0}, {"token": "a"}]}, [-1.0, None]),
        ({"content": None, "token_logprobs": [None, -2.0]}, [None, -2.0]),
        ({}, None),
    ],
)
def test_logprobs_are_read_in_either_dialect(logprobs, read):
    """One a token; one that is missing is missing."""
    assert read == logprobs_of({"logprobs": logprobs})


def test_what_was_asked_for_is_taken_away():
    """Keys are gone, logprobs null, and the choice itself is untouched."""
    choice = {"index": 0, "logprobs": {}, "token_ids": [1], "text": "a"}
    shown = without(choice, StripRules(logprobs=True, keys=frozenset({"token_ids"})))

    assert {"index": 0, "logprobs": None, "text": "a"} == shown
    assert {"index": 0, "logprobs": {}, "token_ids": [1], "text": "a"} == choice
