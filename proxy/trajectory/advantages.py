"""Advantages: how much better than its group a rollout did.

Holds the estimators and the table of them. Nothing is estimated that was not asked for, and nothing is made up for a
reward that is missing. With rewards r of a group of n, m their mean and s their population standard deviation:

    grpo    (r - m) / s; zeros where s is 0 (also where it is too small for a float)
    rloo    r less the mean of the others' rewards, which is (r - m) · n / (n - 1); zero where there are no others
"""

from collections.abc import Callable, Mapping, Sequence
from math import fsum, sqrt
from typing import Final


def grpo(rewards: Sequence[float]) -> list[float]:
    """Rewards centred and scaled by the group's population standard deviation, without any constant added to it."""
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    spread = sqrt(fsum(value * value for value in centred) / len(centred))
    return [value / spread if spread else 0.0 for value in centred]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Each reward less the mean of the others: leave one out."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    total = fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


ESTIMATORS: Final[Mapping[str, Callable[[Sequence[float]], list[float]]]] = {"grpo": grpo, "rloo": rloo}
