"""The format `scored_data`: Atropos' ScoredDataGroup."""

from dataclasses import replace

import pytest
from tests.support import worked

from proxy.export import Inexpressible

TOKENS = [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9]
EXAMPLE = {
    "tokens": [TOKENS],
    "masks": [[-100, -100, -100, 201, 202, 9, -100, -100, -100, -100, 203, 9]],
    "scores": [1.0],
    "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.25, -0.125, 1.0, 1.0, 1.0, 1.0, -1.0, -0.0625]],
}
BARE = replace(worked.FACTS, advantages=None)


def test_tokens_that_were_not_sampled_have_mask_minus_100_and_logprob_1():
    """Nothing is shifted by a position."""
    assert worked.rows("scored_data", facts=BARE) == [EXAMPLE]


def test_a_group_is_one_object():
    group = worked.gathered("scored_data", BARE, replace(BARE, rollout_id="r2", reward=0.0))

    assert {key: [*value, *value] for key, value in EXAMPLE.items()} | {"scores": [1.0, 0.0]} == group


def test_advantages_are_expanded_to_tokens():
    (row,) = worked.rows("scored_data")

    assert row == EXAMPLE | {"advantages": [[0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]]}


def test_a_group_with_advantages_for_some_rollouts_only_is_rejected():
    with pytest.raises(
        Inexpressible, match=r"^Format 'scored_data' requires the same fields in all rows; some have no advantages\.$"
    ):
        worked.gathered("scored_data", BARE, worked.FACTS)


def test_a_missing_reward_is_rejected():
    with pytest.raises(Inexpressible, match=r"^Format 'scored_data' requires a reward; rollout 'r1' has none\.$"):
        worked.rows("scored_data", facts=replace(BARE, reward=None))
