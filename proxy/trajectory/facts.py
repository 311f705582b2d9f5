"""The facts of a rollout that its exported rows contain."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """The facts of a rollout. A thread without a reward of its own has the rollout's."""

    rollout_id: str
    group_id: str | None = None
    status: str = "open"
    reward: float | None = None
    # One, or one for each sampled token.
    step_rewards: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    advantages: Any = None  # unchanged from the trainer
    metadata: Mapping[str, Any] = field(default_factory=dict)
    thread_rewards: Mapping[str, float] = field(default_factory=dict)
    thread_advantages: Mapping[str, float] = field(default_factory=dict)  # estimated

    def rewarded(self, thread: str | None) -> str | None:
        """Return the thread if it has a reward of its own; None if the rollout's reward applies."""
        return thread if thread in self.thread_rewards else None

    def of_thread(self, thread: str | None) -> "RolloutFacts":
        """Return the facts of a row of this thread: with the thread's own reward and advantage, if it has them."""
        if thread is None or thread not in self.thread_rewards:
            return self
        advantages = self.thread_advantages.get(thread, self.advantages)
        return replace(self, reward=self.thread_rewards[thread], advantages=advantages)

    def of_rows(self, threads: Sequence[str | None], *, split: bool) -> "list[RolloutFacts]":
        """Return the facts of each row; with `split`, the rows that have one reward share it."""
        counts = Counter(map(self.rewarded, threads))
        known: dict[str | None, RolloutFacts] = {}
        for thread in threads:
            if thread not in known:
                of_thread = self.of_thread(thread)
                known[thread] = of_thread.split(counts[self.rewarded(thread)]) if split else of_thread
        return [known[thread] for thread in threads]

    def split(self, rows: int) -> "RolloutFacts":
        """Return the facts for each of this many rows, which share the reward and a single advantage."""
        if rows < 2:
            return self
        is_number = isinstance(self.advantages, int | float) and not isinstance(self.advantages, bool)
        return replace(
            self,
            reward=None if self.reward is None else self.reward / rows,
            advantages=self.advantages / rows if is_number else self.advantages,
        )

    def step_reward(self, step_id: str) -> float | None:
        """Return the step's reward, which is the sum of its tokens' rewards; None if it has none."""
        given = self.step_rewards.get(step_id)
        if given is None:
            return None
        return float(given) if isinstance(given, int | float) else fsum(given)

    def token_rewards(self, step_id: str) -> Sequence[float] | None:
        """Return the rewards of the step's sampled tokens; None if it has none by token."""
        given = self.step_rewards.get(step_id)
        return None if given is None or isinstance(given, int | float) else given


_DIGITS: Final = 18  # of a policy version: columns of counts have 64 bits, and int() refuses thousands of digits


def number_of(version: str | None) -> int | None:
    """Return a policy version as a number; None unless it is a decimal number that fits into 64 bits."""
    if version is None or len(version) > _DIGITS or not version.isascii() or not version.isdigit():
        return None
    return int(version)


def is_older(version: str | None, than: str | None) -> bool:
    """Return whether a policy version is lower than another one; false if one of them is no number."""
    number, other = number_of(version), number_of(than)
    return number is not None and other is not None and number < other
