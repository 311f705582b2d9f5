"""The times at which open rollouts are finished.

They are `deadline_s` after the creation, `start_s` after it if no call came, and `idle_s` after the last call.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from proxy.rollouts.rollout import Rollout

MIN_IDLE_S: Final = 1.0  # shorter values act as this one
_NEVER_MS: Final = 2**52  # later than any time of a rollout, and exact as the score of a sorted set
_TERMS: Final = ("deadline_s", "idle_s", "start_s")


def deadlines_of(terms: Mapping[str, Any], *, idle_s: float | None, start_s: float) -> dict[str, float]:
    """Return the deadlines with which a rollout is opened; these are the defaults of `idle_s` and, with it, of `start_s`."""
    given = {name: terms[name] for name in _TERMS if terms.get(name) is not None}
    if idle_s is not None:
        given.setdefault("idle_s", idle_s)
    return {**({"start_s": start_s} if "idle_s" in given else {}), **given}


def due_ms(
    *,
    created_ms: int,
    touched_ms: int,
    began: bool = False,
    deadline_s: float | None = None,
    idle_s: float | None = None,
    start_s: float | None = None,
) -> int | None:
    """Return the Unix ms at which an open rollout is finished if no call begins before; None if it has no deadline.

    `began`: it has a step. Until then it is not idle before `start_s` is over; without `start_s`, as rollouts of earlier
    versions, it is idle from its creation. Its first call touches it before there is a step.
    """
    times: list[float] = [] if deadline_s is None else [created_ms + 1000 * deadline_s]
    quiet_s = start_s if idle_s is None and not began else idle_s
    if quiet_s is not None:
        quiet_ms = touched_ms + 1000 * max(quiet_s, MIN_IDLE_S)
        if start_s is not None and not began:
            start_ms = created_ms + 1000 * start_s
            quiet_ms = start_ms if touched_ms == created_ms else max(quiet_ms, start_ms)
        times.append(quiet_ms)
    return math.ceil(min(*times, _NEVER_MS)) if times else None


def first_due_ms(terms: Mapping[str, Any], now_ms: int) -> int | None:
    """Return `next_look_ms` of a rollout that is opened now with these terms."""
    deadlines: dict[str, Any] = {name: terms.get(name) for name in _TERMS}
    return next_look_ms(Rollout("", "", now_ms, now_ms, **deadlines), now_ms)


def is_past_deadline(rollout: Rollout, now_ms: int) -> bool:
    """Return whether an open rollout is older than `deadline_s`."""
    due = due_ms(created_ms=rollout.created_ms, touched_ms=0, deadline_s=rollout.deadline_s)
    return due is not None and due <= now_ms and not rollout.is_finished


def due_ms_of(rollout: Rollout) -> int | None:
    """Return `due_ms` of a rollout as it was read."""
    return due_ms(
        created_ms=rollout.created_ms,
        touched_ms=rollout.touched_ms,
        began=rollout.began_ms is not None,
        deadline_s=rollout.deadline_s,
        idle_s=rollout.idle_s,
        start_s=rollout.start_s,
    )


def next_look_ms(rollout: Rollout, now_ms: int) -> int | None:
    """Return when an open rollout may be due; None if it has no deadline.

    Its first call can come at any time, and it may be idle before `start_s` is over.
    """
    due = due_ms_of(rollout)
    if due is None or rollout.idle_s is None or rollout.began_ms is not None:
        return due
    return min(due, math.ceil(min(now_ms + 1000 * max(rollout.idle_s, MIN_IDLE_S), _NEVER_MS)))


def left_of(rollout: Rollout, now_ms: int) -> dict[str, float] | None:
    """Return the deadlines with which a rollout is opened in place of this one: `deadline_s` is what is left of this one's.

    None if nothing is left.
    """
    deadlines = {name: value for name in _TERMS if (value := getattr(rollout, name)) is not None}
    if rollout.deadline_s is not None:
        deadlines["deadline_s"] = rollout.deadline_s - (now_ms - rollout.created_ms) / 1000
        if deadlines["deadline_s"] <= 0:
            return None
    return deadlines
