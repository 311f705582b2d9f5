"""The times at which open rollouts are finished: after `deadline_s` since their creation, or `idle_s` without a call."""

import math
from collections.abc import Mapping
from typing import Any, Final

from proxy.rollouts.rollout import Rollout

MIN_IDLE_S: Final = 1.0  # shorter values act as this one
_NEVER_MS: Final = 2**52  # later than any time of a rollout, and exact as the score of a sorted set


def due_ms(
    *, created_ms: int, touched_ms: int, deadline_s: float | None = None, idle_s: float | None = None
) -> int | None:
    """Return the Unix ms at which an open rollout is finished if no call begins before; None if it has no deadline."""
    times: list[float] = [] if deadline_s is None else [created_ms + 1000 * deadline_s]
    times += [] if idle_s is None else [touched_ms + 1000 * max(idle_s, MIN_IDLE_S)]
    return math.ceil(min(*times, _NEVER_MS)) if times else None


def first_due_ms(terms: Mapping[str, Any], now_ms: int) -> int | None:
    """Return `due_ms` of a rollout that is opened now with these terms."""
    deadlines = {name: terms.get(name) for name in ("deadline_s", "idle_s")}
    return due_ms(created_ms=now_ms, touched_ms=now_ms, **deadlines)


def is_past_deadline(rollout: Rollout, now_ms: int) -> bool:
    """Return whether an open rollout is older than `deadline_s`."""
    due = due_ms(created_ms=rollout.created_ms, touched_ms=0, deadline_s=rollout.deadline_s)
    return due is not None and due <= now_ms and not rollout.is_finished


def due_ms_of(rollout: Rollout) -> int | None:
    """Return `due_ms` of a rollout as it was read."""
    return due_ms(
        created_ms=rollout.created_ms,
        touched_ms=rollout.touched_ms,
        deadline_s=rollout.deadline_s,
        idle_s=rollout.idle_s,
    )
