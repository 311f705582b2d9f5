"""The format `scored_data`: Atropos' ScoredDataGroup."""

from dataclasses import replace

import pytest
import worked

from proxy.export import Inexpressible

TOKENS = [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9]
EXAMPLE = {
    "tokens": [TOKENS],
    "masks": [[-100, -100, -100, 201, 202, 9, -100, -100, -100, -100, 203, 9]],
    "scores": [1.0],
    "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.25, -0.125, 1.0, 1.0, 1.0, 1.0, -1.0, -0.0625]],
}
BARE = replace(worked.FACTS, advantages=None)


def test_worked_example():
    """Masks are ids or -100, logprobs 1.0 where nothing was sampled; nothing is shifted."""
    assert [EXAMPLE] == worked.rows("scored_data", facts=BARE)


def test_group():
    """A group is one object."""
    group = worked.gathered("scored_data", BARE, replace(BARE, rollout_id="r2", reward=0.0))

    assert {key: [*value, *value] for key, value in EXAMPLE.items()} | {"scores": [1.0, 0.0]} == group


def test_advantages():
    """Advantages, where given, are by token."""
    (row,) = worked.rows("scored_data")

    assert EXAMPLE | {"advantages": [[0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]]} == row


def test_some_have_advantages():
    """A group of which some have advantages and some none is refused."""
    with pytest.raises(
        Inexpressible, match=r"^Format 'scored_data' requires the same fields in all rows; some have no advantages\.$"
    ):
        worked.gathered("scored_data", BARE, worked.FACTS)


def test_no_reward():
    """A score is not made up."""
    with pytest.raises(Inexpressible, match=r"^Format 'scored_data' requires a reward; rollout 'r1' has none\.$"):
        worked.rows("scored_data", facts=replace(BARE, reward=None))
