"""Gathering: the rows of a group's rollouts, with their advantages, put together as the trainer takes them.

Holds what a group gives and why it may give nothing. It neither claims nor changes a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from proxy.control.steps import aside
from proxy.control.wanted import GIVEN, Wanted
from proxy.errors import Conflict, NotFound
from proxy.export import Inexpressible, Rows
from proxy.parts import Parts
from proxy.rollouts import Rollout
from proxy.trajectory.advantages import ESTIMATORS

ADVANTAGES: Final = (*GIVEN, *ESTIMATORS)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a group must have to be worth training: rollouts with rows, and rewards that differ."""

    min_group: int = 1
    only_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows of each rollout of a group, in its order; or none, and `why`."""

    members: list[Rows]
    skipped: list[dict[str, str]]
    why: str | None = None

    async def whole(self, wanted: Wanted, place: int = 0) -> Any:
        """The group as the trainer takes it. Raises Conflict for members that cannot stand in one group."""
        try:
            return await aside(
                sum(len(member.rows) for member in self.members), lambda: wanted.form.gather(self.members, place)
            )
        except Inexpressible as refusal:
            raise Conflict(str(refusal), param="format") from None


async def gather(parts: Parts, wanted: Wanted, rollouts: Sequence[Rollout], worth: Worth) -> Gathered:
    """The rows of these rollouts, the members of one group. Raises Conflict if the format cannot say one of them."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if worth.only_mixed and len(set(rewards)) < 2:
        return Gathered([], [], f"the rewards of its {len(rollouts)} rollouts are all equal")
    members, skipped = [], []
    for rollout in with_advantages(rollouts, wanted.advantage):
        try:
            rows = await wanted.rows(parts, rollout)
        except NotFound:
            skipped.append({"rollout_id": rollout.rollout_id, "why": "it was deleted"})
            rows = Rows([], [])
        members.append(rows)
        skipped += [{"rollout_id": rollout.rollout_id, **left} for left in rows.skipped]
    with_rows = sum(bool(member.rows) for member in members)
    if with_rows < worth.min_group:
        return Gathered([], skipped, f"{with_rows} of its rollouts have rows, and min_group={worth.min_group}")
    return Gathered(members, skipped)


def with_advantages(rollouts: Sequence[Rollout], how: str) -> list[Rollout]:
    """The rollouts with estimated advantages; as they are where these are given. One without a reward gets none."""
    if how not in ESTIMATORS:
        return list(rollouts)
    rewarded = [rollout for rollout in rollouts if rollout.reward is not None]
    estimated = ESTIMATORS[how]([float(rollout.reward or 0.0) for rollout in rewarded])
    by_id = {rollout.rollout_id: value for rollout, value in zip(rewarded, estimated, strict=True)}
    return [replace(rollout, advantages=by_id.get(rollout.rollout_id)) for rollout in rollouts]
