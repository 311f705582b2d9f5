"""Estimators of advantages, from the returns of rollouts (`returns.py`): one for a whole rollout, or one for each of its turns.

The rollouts i = 1..n have the returns g(i,t) of T(i) turns. A rollout counts once, however many turns it has:

    a(i) = mean over t of g(i,t)        m = mean over i of a(i)        s² = mean over i of the mean over t of (g(i,t) - m)²

With one return for each rollout, its reward, m and s are the mean and the population standard deviation of the rewards. Where
all rollouts have the same number of turns, they are those of all returns.

    grpo           (g - m) / s                         DeepSeekMath, arXiv 2402.03300, 4.1.2
    dr_grpo        g - m                               Understanding R1-Zero-Like Training, arXiv 2503.20783, 3.2
    rloo           g - mean over the other i of a(i)   Back to Basics, arXiv 2402.14740, equation 8
    reinforce_pp   (g - m) / s over a whole batch      REINFORCE++, arXiv 2501.03262, equation 6
    step           g: the return itself, without a baseline

All advantages are zero if all returns are equal, as those of a single rollout with one return are: a baseline needs others.

The trainers' code, to which the tests compare these:

- TRL 1.16.0: AsyncGRPO (`_score_group`) has the population standard deviation of `grpo` and adds 1e-8 to it; GRPOTrainer has
  the sample standard deviation, and adds 1e-4.
- verl 0.9.1 (`core_algos.py`): `rloo`; `dr_grpo` is `grpo` with `norm_adv_by_std_in_grpo: false`; `grpo` and `reinforce_pp`
  (`reinforce_plus_plus`) have the sample standard deviation. A single rollout keeps its reward as its advantage.
- OpenRLHF 0.11.2 (`experience_maker.py`): `rloo`, `dr_grpo`, and `reinforce_pp` as `reinforce`.

verl and OpenRLHF normalize `reinforce_pp` over tokens, so that a long response counts more.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import frexp, fsum, ldexp, sqrt
from typing import Final, TypeAlias

Returns: TypeAlias = Sequence[Sequence[float]]  # by rollout, one for each turn; none of them is empty
Advantages: TypeAlias = list[list[float]]  # of the same shape


def normalized(returns: Returns) -> Advantages:
    """Return the returns centred and scaled by their population standard deviation, without an added constant."""
    centred = centered(returns)
    largest = max((abs(value) for rollout in centred for value in rollout), default=0.0)
    if not largest:
        return centred
    exponent = frexp(largest)[1]  # divided by this power of two, exactly, squares neither overflow nor vanish
    scaled = [[ldexp(value, -exponent) for value in rollout] for rollout in centred]
    spread = sqrt(fsum(fsum(value * value for value in rollout) / len(rollout) for rollout in scaled) / len(scaled))
    return [[value / spread for value in rollout] for rollout in scaled]


def centered(returns: Returns) -> Advantages:
    """Return the returns minus their mean."""
    if _are_equal(returns):
        return _zeros(returns)
    mean = fsum(map(_mean, returns)) / len(returns)
    return [[value - mean for value in rollout] for rollout in returns]


def rloo(returns: Returns) -> Advantages:
    """Return each return minus the mean of the other rollouts' (leave-one-out)."""
    if len(returns) < 2 or _are_equal(returns):
        return _zeros(returns)
    means = list(map(_mean, returns))
    total = fsum(means)
    return [
        [value - (total - mean) / (len(returns) - 1) for value in rollout]
        for rollout, mean in zip(returns, means, strict=True)
    ]


def uncentered(returns: Returns) -> Advantages:
    """Return the returns."""
    return list(map(list, returns))


def _mean(rollout: Sequence[float]) -> float:
    return fsum(rollout) / len(rollout)


def _are_equal(returns: Returns) -> bool:
    return len(set(chain.from_iterable(returns))) < 2


def _zeros(returns: Returns) -> Advantages:
    return [[0.0] * len(rollout) for rollout in returns]


BATCH: Final = "reinforce_pp"  # the only one over the rollouts of several groups
STEP: Final = "step"  # the only one that needs no other rollouts
ESTIMATORS: Final[Mapping[str, Callable[[Returns], Advantages]]] = {
    "grpo": normalized,
    "rloo": rloo,
    "dr_grpo": centered,
    BATCH: normalized,
    STEP: uncentered,
}
