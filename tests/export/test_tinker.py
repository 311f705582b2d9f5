"""The format `tinker`: inputs and targets shifted by one position."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import Inexpressible


def test_targets_begin_at_position_1_and_the_input_lacks_the_last_token():
    assert worked.rows("tinker") == [
        {
            "model_input": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203],
            "target_tokens": [102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            "logprobs": [0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
            "advantages": [0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5],
        }
    ]


def test_a_missing_advantage_is_rejected():
    with pytest.raises(Inexpressible, match="requires an advantage; rollout .* has none"):
        worked.rows("tinker", facts=replace(worked.FACTS, advantages=None))


def test_a_token_sampled_at_the_first_position_is_rejected():
    """It would have no input."""
    with pytest.raises(
        Inexpressible, match="requires a prompt before the first sampled token; rollout .* has a sequence without one"
    ):
        worked.rows("tinker", [make_step("a", [], [10, 20])])
