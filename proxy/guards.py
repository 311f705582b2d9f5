"""The guards: what a call must pass before anything is sent.

Holds an ordered tuple of pure functions `(Rollout, now_ms) -> None | raises`. Who may call at all is decided before, in
`calls`, since it decides which rollout it is.
"""

from collections.abc import Callable

from proxy.errors import LimitReached, RolloutClosed
from proxy.rollouts import Rollout

Guard = Callable[[Rollout, int], None]


def is_open(rollout: Rollout, _now_ms: int) -> None:
    """A finished rollout takes no calls."""
    if rollout.is_finished:
        raise RolloutClosed(f"the rollout {rollout.rollout_id!r} is {rollout.status} and takes no more calls")


def within_limits(rollout: Rollout, now_ms: int) -> None:
    """A rollout takes as many steps, sampled tokens and seconds as it was given."""
    limits, steps, tokens = (
        rollout.limits,
        rollout.counts.get("steps", 0),
        rollout.counts.get("sampled_tokens", 0),
    )
    name = f"the rollout {rollout.rollout_id!r}"
    if limits.max_steps is not None and steps >= limits.max_steps:
        raise LimitReached(f"{name} has its {limits.max_steps} steps")
    if rollout.has_reservation is False:
        raise LimitReached(
            f"{name} has {steps} of its {limits.max_steps} steps, and calls for the others are in flight"
        )
    if limits.max_tokens is not None and tokens >= limits.max_tokens:
        raise LimitReached(f"{name} has sampled {tokens} tokens of its {limits.max_tokens}")
    if limits.deadline_s is not None and now_ms - rollout.created_ms > limits.deadline_s * 1000:
        raise LimitReached(f"{name} is past its deadline of {limits.deadline_s:g} s")


GUARDS: tuple[Guard, ...] = (is_open, within_limits)
