"""Advantages: the formulas, and what they make of groups without a difference."""

from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.advantages import ESTIMATORS, grpo, rloo

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)


def test_grpo_by_hand():
    """Centred, and scaled by the population's standard deviation."""
    assert [1.0, -1.0] == grpo([1.0, 0.0])
    assert [sqrt(3), -1 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3)] == pytest.approx(grpo([1.0, 0.0, 0.0, 0.0]))


def test_rloo_by_hand():
    """Each less the mean of the others."""
    assert [1.0, -1.0] == rloo([1.0, 0.0])
    assert [1.0, -1 / 3, -1 / 3, -1 / 3] == pytest.approx(rloo([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.5, 0.5, 0.5], [0.1] * 7])
def test_a_group_without_a_difference_has_no_advantage(name, rewards):
    """Zeros, and no division by zero."""
    assert [0.0] * len(rewards) == ESTIMATORS[name](rewards)


@given(REWARDS)
def test_advantages_sum_to_nothing_and_keep_the_order(rewards):
    """A better reward is never a lesser advantage."""
    for estimate in ESTIMATORS.values():
        found = estimate(rewards)
        assert isclose(0.0, sum(found), abs_tol=1e-6 * (1 + max(map(abs, found))))
        assert sorted(found) == [value for _, value in sorted(zip(rewards, found, strict=True))]
