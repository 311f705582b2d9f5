"""The returns of a rollout's turns, the penalty of long responses, and the advantages that are estimated from the returns.

docs/http-api.md describes turns, their rewards r(t) and the penalty. The turns of a thread with a reward of its own are a
sequence by themselves. With the discount d, the return of a turn is its reward to go, as in Kevin (arXiv 2507.11948, d = 0.4):

    g(t) = r(t) + d · r(t + 1) + d² · r(t + 2) + … + d^(T - t) · r(T)

verl and OpenRLHF discount each token instead. The penalty is DAPO's (arXiv 2503.14476, equation 13), as
in verl 0.9.1 (`DAPORewardManager`) and OpenRLHF 0.11.2 (`apply_overlong_penalty`) with the factor 1; tool outputs count, too.

A rollout or each of its turns has an advantage. The rollouts i = 1..n have returns g(i,t) of T(i) turns; each counts once:

    a(i) = mean over t of g(i,t)        m = mean over i of a(i)        s² = mean over i of the mean over t of (g(i,t) - m)²

    grpo           (g - m) / s                         DeepSeekMath, arXiv 2402.03300, 4.1.2
    dr_grpo        g - m                               Understanding R1-Zero-Like Training, arXiv 2503.20783, 3.2
    rloo           g - mean over the other i of a(i)   Back to Basics, arXiv 2402.14740, equation 8
    reinforce_pp   (g - m) / s over a whole batch      REINFORCE++, arXiv 2501.03262, equation 6
    step           g: the return itself, without a baseline
    vine           V(next) - V(this)        VinePPO, arXiv 2410.01679, section 4, without rewards before the end

`vine` gives the tokens from one valued state of the rollout up to the next the difference of their values, and the last ones
the reward - V(this). The value of a state is the mean reward of the rollouts that branch there.

All advantages but those of `step` and `vine` are zero if all returns are equal. The trainers' code, to which the tests compare
these:

- TRL 1.16.0: AsyncGRPO (`_score_group`) has the population standard deviation of `grpo` and adds 1e-8 to it; GRPOTrainer has
  the sample standard deviation, and adds 1e-4.
- verl 0.9.1 (`core_algos.py`): `rloo`; `dr_grpo` is `grpo` with `norm_adv_by_std_in_grpo: false`; `grpo` and `reinforce_pp`
  (`reinforce_plus_plus`) have the sample standard deviation. A single rollout keeps its reward as its advantage.
- OpenRLHF 0.11.2 (`experience_maker.py`): `rloo`, `dr_grpo`, and `reinforce_pp` as `reinforce`.

verl and OpenRLHF normalize `reinforce_pp` over tokens, so that a long response counts more.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import frexp, fsum, ldexp, sqrt
from typing import Final, TypeAlias

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, sequences
from proxy.trajectory.step import Step


@dataclass(frozen=True, slots=True)
class SoftPenalty:
    """The penalty of responses longer than `max_len - buffer` tokens; `buffer` is at least 1 and at most `max_len`."""

    max_len: int
    buffer: int

    def of(self, length: int) -> float:
        """Return the penalty of a response, from 0 to -1."""
        return -min(max(length - (self.max_len - self.buffer), 0), self.buffer) / self.buffer


@dataclass(frozen=True, slots=True)
class Episode:
    """The steps that share a reward."""

    trained: tuple[str, ...]  # the steps that rows train, the oldest first
    steps: tuple[str, ...]
    response_len: int  # of the longest response
    thread: str | None = None  # the thread that has the reward; None: the rollout has it

    def penalized(self, facts: RolloutFacts, penalty: SoftPenalty) -> RolloutFacts:
        """Return the facts with the penalty added to the reward, and to the last trained step's reward if it has one."""
        lowered_by = penalty.of(self.response_len)
        if not lowered_by:
            return facts
        if self.thread is not None:
            rewards = {**facts.thread_rewards, self.thread: facts.thread_rewards[self.thread] + lowered_by}
            facts = replace(facts, thread_rewards=rewards)
        elif facts.reward is not None:
            facts = replace(facts, reward=facts.reward + lowered_by)
        last = self.trained[-1]
        own = facts.step_rewards.get(last)
        if own is None:
            return facts
        lowered = own + lowered_by if isinstance(own, int | float) else [*own[:-1], own[-1] + lowered_by]
        return replace(facts, step_rewards={**facts.step_rewards, last: lowered})

    def turns(self, facts: RolloutFacts) -> tuple[str, ...]:
        """Return the ids of the turns, the oldest first."""
        trained = {*self.trained}
        return tuple(step_id for step_id in self.steps if step_id in trained or step_id in facts.step_rewards)


def returns(turns: Sequence[str], facts: RolloutFacts, discount: float) -> tuple[float, ...]:
    """Return the return of each of these turns; nothing if the last one has no reward."""
    rewards = list(map(facts.step_reward, turns))
    if not rewards:
        return ()
    if rewards[-1] is None:
        rewards[-1] = facts.reward
    if rewards[-1] is None:
        return ()
    following = 0.0
    found = [following := (reward or 0.0) + discount * following for reward in reversed(rewards)]
    return tuple(reversed(found))


def episodes(steps: Sequence[Step], facts: RolloutFacts, options: Options) -> list[Episode]:
    """Return the episodes of the steps that may be trained: with the rollout's reward, then of each thread with its own."""
    branches = sequences(steps, facts, options).branches
    steps = [step for step in steps if options.trains(step)]
    found = []
    rewarded = {step.thread for step in steps if step.thread is not None and step.thread in facts.thread_rewards}
    for thread in (None, *sorted(rewarded)):
        of_thread = [branch for branch in branches if facts.rewarded(branch.thread) == thread]
        found.append(
            Episode(
                trained=_sorted(step_id for branch in of_thread for step_id in branch.step_ids),
                steps=_sorted(step.step_id for step in steps if facts.rewarded(step.thread) == thread),
                response_len=max((branch.response_len for branch in of_thread), default=0),
                thread=thread,
            )
        )
    return found


def _sorted(step_ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(step_ids)))


def vine(turns: Sequence[int], values: Mapping[int, float], start: float, reward: float) -> tuple[float, ...]:
    """Return the advantage of each turn: the value of the next valued state minus that of the last one.

    `turns` are the indexes of their steps, and `values` has the values of the states before some steps by their indexes. The
    value before all of these is `start`, after them it is the reward.
    """
    states = sorted(values)
    known = [start, *(values[state] for state in states), reward]
    passed = (bisect_right(states, turn) for turn in turns)
    return tuple(known[count + 1] - known[count] for count in passed)


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
VINE: Final = "vine"  # of the returns that `vine` makes
ESTIMATORS: Final[Mapping[str, Callable[[Returns], Advantages]]] = {
    "grpo": normalized,
    "rloo": rloo,
    "dr_grpo": centered,
    BATCH: normalized,
    STEP: uncentered,
    VINE: uncentered,
}
