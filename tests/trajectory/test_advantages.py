"""Advantage estimators, of rollouts and of turns."""

from math import isclose, isfinite, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.advantages import BATCH, ESTIMATORS, STEP

LARGEST = 3.4028234663852886e38  # of float32
BASELINES = [name for name in ESTIMATORS if name != STEP]
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)  # the mean of 0 and 5e-324 is 0
REWARDS = st.lists(NUMBERS, min_size=2, max_size=16)
RETURNS = st.lists(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=5), max_size=6)
MODERATE = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6)


def of_rewards(name, rewards):
    """Return the advantages of rollouts with one return each."""
    return [value for (value,) in ESTIMATORS[name]([[reward] for reward in rewards])]


@pytest.mark.parametrize("name", ["grpo", BATCH])
def test_grpo_and_reinforce_pp_scale_by_the_population_standard_deviation(name):
    assert [1.0, -1.0] == of_rewards(name, [1.0, 0.0])
    assert [sqrt(3), -1 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3)] == pytest.approx(of_rewards(name, [1.0, 0.0, 0.0, 0.0]))


def test_dr_grpo_subtracts_the_mean():
    assert [0.75, -0.25, -0.25, -0.25] == of_rewards("dr_grpo", [1.0, 0.0, 0.0, 0.0])


def test_rloo_subtracts_the_mean_of_the_other_rewards():
    assert [1.0, -1.0] == of_rewards("rloo", [1.0, 0.0])
    assert [1.0, -1 / 3, -1 / 3, -1 / 3] == pytest.approx(of_rewards("rloo", [1.0, 0.0, 0.0, 0.0]))


def test_step_returns_the_returns():
    assert [[1.5, 1.0], [0.0]] == ESTIMATORS[STEP]([(1.5, 1.0), (0.0,)])


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.5, 0.5, 0.5], [0.1] * 7, [0.0, -0.0], [LARGEST] * 3])
def test_equal_rewards_have_zero_advantages(name, rewards):
    """One reward has as well: there is nothing to compare it with."""
    assert [0.0] * len(rewards) == of_rewards(name, rewards)


@given(REWARDS)
def test_advantages_sum_to_zero_and_are_ordered_like_the_rewards(rewards):
    for name in BASELINES:
        found = of_rewards(name, rewards)
        assert isclose(0.0, sum(found), abs_tol=1e-6 * (1 + max(map(abs, found))))
        assert sorted(found) == [value for _, value in sorted(zip(rewards, found, strict=True))]


@given(RETURNS)
def test_every_advantage_is_finite_and_has_its_turn(returns):
    """Returns up to the largest float32 and down to the smallest numbers; `grpo` is bounded by its definition."""
    for name, estimate in ESTIMATORS.items():
        found = estimate(returns)
        assert list(map(len, returns)) == list(map(len, found))
        assert all(isfinite(value) for rollout in found for value in rollout)
        if name in ("grpo", BATCH) and returns:
            turns = max(map(len, returns))
            assert all(abs(value) <= 1.0001 * sqrt(len(returns) * turns) for rollout in found for value in rollout)


@given(MODERATE)
def test_advantages_of_turns_are_those_of_weighted_statistics(returns):
    """In numpy: each rollout has the weight 1 / n, divided among its turns."""
    values = np.array([value for rollout in returns for value in rollout])
    weights = np.array([1 / (len(rollout) * len(returns)) for rollout in returns for _ in rollout])
    owners = np.array([index for index, rollout in enumerate(returns) for _ in rollout])
    means = np.array(list(map(np.mean, returns)))
    mean = np.average(values, weights=weights)
    spread = np.sqrt(np.average((values - mean) ** 2, weights=weights))

    def flat(name):
        return [value for rollout in ESTIMATORS[name](returns) for value in rollout]

    assert flat("dr_grpo") == pytest.approx(values - mean, abs=1e-9)
    if spread > 1e-6:
        assert flat("grpo") == flat(BATCH) == pytest.approx((values - mean) / spread, rel=1e-6, abs=1e-6)
    if len(returns) > 1:
        others = (means.sum() - means) / (len(returns) - 1)
        assert flat("rloo") == pytest.approx(values - others[owners], abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=6), st.integers(1, 4))
def test_turns_that_all_have_the_reward_of_their_rollout_have_the_advantage_of_the_rollout(rewards, turns):
    for name in BASELINES:
        by_turn = ESTIMATORS[name]([[reward] * (1 + index % turns) for index, reward in enumerate(rewards)])
        for value, of_turns in zip(of_rewards(name, rewards), by_turn, strict=True):
            assert [value] * len(of_turns) == pytest.approx(of_turns, rel=1e-6, abs=1e-9)
