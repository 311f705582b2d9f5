"""The returns of a rollout's turns, and the penalty of long responses.

**Turns** are the steps that a row trains or that have a reward of their own, in the order in which they were recorded, on
any branch. Turn t = 1..T has the reward r(t): its step's (the sum of its tokens'), or else 0. If the last turn has no reward of
its own, it gets the rollout's, as in SkyRL's rewards by token. The turns of a thread with a reward of its own are
a sequence by themselves, whose last turn gets the reward of the thread. With the discount d, the return of a turn is its reward
to go:

    g(t) = r(t) + d · r(t + 1) + d² · r(t + 2) + … + d^(T - t) · r(T)

As in Kevin (arXiv 2507.11948, with d = 0.4). verl's and OpenRLHF's returns are these with a discount for each token; they are
equal where each turn is one token, or where d is 1.

**The penalty** is DAPO's soft one (arXiv 2503.14476, equation 13), of a response of y tokens:

    0 up to max_len - buffer, then (max_len - buffer - y) / buffer, and -1 above max_len

As in verl 0.9.1 (`DAPORewardManager`, where no response exceeds `max_resp_len`) and OpenRLHF 0.11.2 (`apply_overlong_penalty`),
with the factor 1. They count the tokens of tool outputs between turns, too. The response is what follows the first prompt of
the rollout's longest row, or for the reward of a thread, of the thread's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    """The steps that share a reward: those that rows train, the oldest first, all steps, and the longest response's length.

    `thread` is the one whose reward it is; None if it is that of the rollout.
    """

    trained: tuple[str, ...]
    steps: tuple[str, ...]
    response_len: int
    thread: str | None = None

    def penalized(self, facts: RolloutFacts, penalty: SoftPenalty) -> RolloutFacts:
        """Return the facts with the penalty: in the reward, and in that of its last trained step if it has one."""
        lowered_by = penalty.of(self.response_len)
        if not lowered_by:
            return facts
        facts = self._with_reward(facts, lowered_by)
        last = self.trained[-1]
        own = facts.step_rewards.get(last)
        if own is None:
            return facts
        lowered = own + lowered_by if isinstance(own, int | float) else [*own[:-1], own[-1] + lowered_by]
        return replace(facts, step_rewards={**facts.step_rewards, last: lowered})

    def _with_reward(self, facts: RolloutFacts, lowered_by: float) -> RolloutFacts:
        if self.thread is not None:
            lowered = facts.thread_rewards[self.thread] + lowered_by
            return replace(facts, thread_rewards={**facts.thread_rewards, self.thread: lowered})
        return facts if facts.reward is None else replace(facts, reward=facts.reward + lowered_by)

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
    """Return what the rows of a rollout train: that with the rollout's reward first, then that of each thread with its own."""
    branches = sequences(steps, facts, options).branches
    found = []
    rewarded = {step.thread for step in steps if step.thread is not None and step.thread in facts.thread_rewards}
    for thread in (None, *sorted(rewarded)):
        of_thread = [branch for branch in branches if facts.rewarded(branch.thread) == thread]
        found.append(
            Episode(
                trained=_sorted(step_id for branch in of_thread for step_id in branch.step_ids),
                steps=_sorted(step.step_id for step in steps if facts.rewarded(step.thread) == thread),
                response_len=max((branch.end - branch.path[0].start for branch in of_thread), default=0),
                thread=thread,
            )
        )
    return found


def _sorted(step_ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(step_ids)))
