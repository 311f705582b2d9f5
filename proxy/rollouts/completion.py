"""Completion: a group whose members are all finished is offered to whoever claims batches.

Holds the one way into the queue. What is done here may be done again, by anybody, and changes nothing then: so a finish that
is asked again, and the look at all groups when a process starts, make good what a crash left between two steps.
"""

import asyncio
from dataclasses import dataclass

import orjson

from proxy.clock import Clock
from proxy.errors import DamagedStep, NotFound, ProxyError
from proxy.rollouts.group import Group, find_group, mark_finished
from proxy.rollouts.rollout import Rollout, read_rollout, write_fields
from proxy.rollouts.steps import aside, read_steps
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.facts import number_of
from proxy.trajectory.step import Step
from storage.errors import FieldsChanged, StorageError
from storage.store import Store

_AT_ONCE = 16  # rollouts asked for side by side


@dataclass(frozen=True, slots=True)
class GroupCompletion:
    """Puts groups into the queue once all their rollouts are finished."""

    store: Store
    clock: Clock
    metrics: Metrics

    async def member_finished(self, rollout: Rollout) -> None:
        """Note in its group that a rollout is finished, and offer the group if that made it complete."""
        if rollout.group_id is None:
            return
        group = await find_group(self.store, rollout.group_id)
        if group is None or rollout.rollout_id not in group.members:
            return
        await mark_finished(self.store, self.clock, group, rollout.rollout_id)
        await self.complete_if_full(rollout.group_id)

    async def complete_if_full(self, group_id: str) -> None:
        """Offer a group if it is open and all its members are finished: once, whoever else does so now."""
        group = await find_group(self.store, group_id)
        if group is None or group.status != "open" or not group.is_full:
            return
        oldest = await _oldest_version(self.store, group)
        now_ms = self.clock.now_ms()
        fields = write_fields({"status": "complete", "complete_ms": now_ms, "oldest": oldest})
        try:
            note = orjson.dumps({"oldest": oldest})
            await self.store.queue.enqueue(group_id, note, fields, expect={"status": None}, now_ms=now_ms)
            self.metrics.group_events.labels("complete").inc()
        except FieldsChanged:
            return  # somebody was quicker

    async def settle_all(self) -> None:
        """Offer every group that is complete and was not offered, because a process died in between."""
        try:
            async for group_id in self.store.groups.names():
                group = await find_group(self.store, group_id)
                if group is not None and group.status == "open" and group.size is not None:
                    await self.settle(group)
        except (StorageError, ProxyError) as error:
            LOG.error("groups are not looked through", extra={"fields": {"why": str(error)}})

    async def settle(self, group: Group) -> None:
        """Make good for one open group what a crash may have left: finished members that it was not told of."""
        rollouts = await members_of(self.store, group)
        untold = [one.rollout_id for one in rollouts if one.is_finished and one.rollout_id not in group.finished]
        if untold:
            await mark_finished(self.store, self.clock, group, *untold)
        await self.complete_if_full(group.group_id)


async def members_of(store: Store, group: Group) -> list[Rollout]:
    """The rollouts of a group that are there, in the group's order."""
    found: list[Rollout] = []
    for start in range(0, len(group.members), _AT_ONCE):
        names = group.members[start : start + _AT_ONCE]
        stored = await asyncio.gather(*map(store.get, names))
        found += [read_rollout(one) for one in stored if one is not None]
    return found


async def _oldest_version(store: Store, group: Group) -> str | None:
    """Return the oldest policy version that sampled a token of the group; None if one of them is not known as a number."""
    oldest: int | None = None
    for rollout in await members_of(store, group):
        try:
            steps = await read_steps(store, rollout, whole=False)
        except NotFound:
            continue  # deleted meanwhile
        except DamagedStep as damage:
            LOG.error("a group has no oldest policy version", extra={"fields": {"why": damage.message}})
            return None
        for version in await aside(len(steps), lambda steps=steps: versions_of(steps)):  # type: ignore[misc]
            number = number_of(version)
            if number is None:
                return None
            oldest = number if oldest is None else min(oldest, number)
    return None if oldest is None else str(oldest)


def versions_of(steps: list[Step]) -> set[str | None]:
    """Return the policy versions that sampled tokens of these steps, with None if one of them is not known."""
    return {span.policy_version for step in steps for choice in step.choices for span in choice.spans}
