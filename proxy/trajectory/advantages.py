"""Estimators of the advantages of a group's rollouts.

With rewards r of a group of n, m their mean and s their population standard deviation:

    grpo    (r - m) / s; zeros where s is 0 (also where it is too small for a float)
    rloo    r minus the mean of the other rewards, which is (r - m) · n / (n - 1); zero where there are no others
"""

from collections.abc import Callable, Mapping, Sequence
from math import fsum, sqrt
from typing import Final


def grpo(rewards: Sequence[float]) -> list[float]:
    """Return the rewards centred and scaled by the group's population standard deviation, without an added constant."""
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    spread = sqrt(fsum(value * value for value in centred) / len(centred))
    return [value / spread if spread else 0.0 for value in centred]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the others (leave-one-out)."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    total = fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


ESTIMATORS: Final[Mapping[str, Callable[[Sequence[float]], list[float]]]] = {"grpo": grpo, "rloo": rloo}
