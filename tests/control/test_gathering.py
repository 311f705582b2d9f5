"""The advantages that a group's rollouts are given; the rest is asserted by the exports of groups."""

import pytest

from proxy.control.gathering import ADVANTAGES, with_advantages
from proxy.rollouts import Rollout


def rollouts(*rewards):
    return [Rollout(f"r{n}", "b", 1, 1, reward=reward, advantages=9) for n, reward in enumerate(rewards)]


def test_given_and_none_leave_the_rollouts_as_they_are():
    """What none leaves out is left out when rows are made."""
    given = rollouts(1, None)

    assert given == with_advantages(given, "given") == with_advantages(given, "none")
    assert ("given", "none", "grpo", "rloo") == ADVANTAGES


@pytest.mark.parametrize(("how", "expected"), [("grpo", [1.0, None, -1.0]), ("rloo", [1.0, None, -1.0])])
def test_a_rollout_without_a_reward_gets_none_and_counts_for_nothing(how, expected):
    """The others are compared with each other."""
    assert expected == [rollout.advantages for rollout in with_advantages(rollouts(1, None, 0), how)]
