"""Rollouts as they stood when the store was last there.

Holds a bounded memory of terms, for calls that are made while a journal stands in for the store. Rule: what cannot be kept
without the store is not remembered. A rollout with a limit of steps or tokens is such a one, since nobody counts for it then;
so is one that was never met, since its terms are not known.
"""

from collections import OrderedDict

from proxy.rollouts import Rollout

_MOST = 10_000


class Remembered:
    """The rollouts met last, by id."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[str, Rollout] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Remembered {len(self._rollouts)}>"

    def keep(self, rollout: Rollout) -> None:
        """Remember how a rollout stands, in place of how it stood."""
        self._rollouts.pop(rollout.rollout_id, None)
        if rollout.limits.max_steps is None and rollout.limits.max_tokens is None:
            self._rollouts[rollout.rollout_id] = rollout
        if len(self._rollouts) > _MOST:
            self._rollouts.popitem(last=False)

    def find(self, rollout_id: str) -> Rollout | None:
        """How it stood, if that is remembered."""
        return self._rollouts.get(rollout_id)
