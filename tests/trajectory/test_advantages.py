"""Advantage estimators: GRPO and RLOO."""

from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.advantages import ESTIMATORS, grpo, rloo

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)


def test_grpo_centers_and_scales_by_the_population_standard_deviation():
    assert [1.0, -1.0] == grpo([1.0, 0.0])
    assert [sqrt(3), -1 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3)] == pytest.approx(grpo([1.0, 0.0, 0.0, 0.0]))


def test_rloo_subtracts_the_mean_of_the_other_rewards():
    assert [1.0, -1.0] == rloo([1.0, 0.0])
    assert [1.0, -1 / 3, -1 / 3, -1 / 3] == pytest.approx(rloo([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.5, 0.5, 0.5], [0.1] * 7])
def test_a_group_of_equal_rewards_has_zero_advantages(name, rewards):
    assert [0.0] * len(rewards) == ESTIMATORS[name](rewards)


@given(REWARDS)
def test_advantages_sum_to_zero_and_are_ordered_like_the_rewards(rewards):
    for estimate in ESTIMATORS.values():
        found = estimate(rewards)
        assert isclose(0.0, sum(found), abs_tol=1e-6 * (1 + max(map(abs, found))))
        assert sorted(found) == [value for _, value in sorted(zip(rewards, found, strict=True))]
