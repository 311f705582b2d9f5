"""Retries: which call was another's next attempt, as far as the calls say so.

Holds the pairing of attempts. It must not judge which attempt counts: that is the tree's. That two bodies are alike is
no proof here (compaction repeats bodies); a client's own word is.
"""

from collections.abc import Iterable
from typing import Any

from proxy.trajectory.step import Step


def earlier_attempts(steps: Iterable[Step]) -> dict[str, str]:
    """Of each retry, by step id, the attempt before it.

    A step that knows (`retry_of`) has the last word. One that knows only that it is attempt N follows attempt N - 1 with
    the same body: one that nobody followed yet and that did not arrive, the oldest first. One that arrived is followed only
    if it is the only one: of several equal calls made side by side nobody can say which was made again, and an attempt
    that we refused has left no step at all.
    """
    ordered = sorted(steps, key=lambda step: step.step_id)
    pairs = {step.step_id: step.extra["retry_of"] for step in ordered if "retry_of" in step.extra}
    asking = [step for step in ordered if _attempt(step) and step.step_id not in pairs]
    if not asking:
        return pairs
    free: dict[tuple[Any, int], list[Step]] = {}
    followed = set(pairs.values())
    for step in sorted(ordered, key=lambda step: (arrived(step), step.step_id)):
        if step.step_id not in followed:
            free.setdefault((step.extra.get("request_key"), _attempt(step)), []).append(step)
    for step in asking:
        before = free.get((step.extra.get("request_key"), _attempt(step) - 1))
        if before and (len(before) == 1 or not arrived(before[0])):
            pairs[step.step_id] = before.pop(0).step_id
    return pairs


def arrived(step: Step) -> bool:
    """Whether its client got it whole, as far as anybody knows."""
    return step.delivered and step.status == "complete"


def _attempt(step: Step) -> int:
    """0 for a first attempt."""
    return int(step.extra.get("attempt", 0))
