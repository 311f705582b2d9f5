"""Completion of groups: a group whose members are all finished is put into the queue of batches.

Every operation is idempotent. A repeated finish, and the scan of all groups when a process starts, complete what a crash left
unfinished.
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

_CONCURRENCY = 16  # rollouts read at the same time


@dataclass(frozen=True, slots=True)
class GroupCompletion:
    """Put groups into the queue once all their rollouts are finished."""

    store: Store
    clock: Clock
    metrics: Metrics

    async def member_finished(self, rollout: Rollout) -> None:
        """Mark a rollout as finished in its group, and enqueue the group if it is complete now."""
        if rollout.group_id is None:
            return
        group = await find_group(self.store, rollout.group_id)
        if group is None or rollout.rollout_id not in group.members:
            return
        await mark_finished(self.store, self.clock, group, rollout.rollout_id)
        await self.complete_if_full(rollout.group_id)

    async def complete_if_full(self, group_id: str) -> None:
        """Enqueue a group if it is open and all its members are finished; concurrent calls enqueue it once."""
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
            return  # another process has enqueued it

    async def settle_all(self) -> None:
        """Enqueue every complete group that was not enqueued because a process died."""
        try:
            async for group_id in self.store.groups.names():
                group = await find_group(self.store, group_id)
                if group is not None and group.status == "open" and group.size is not None:
                    await self.settle(group)
        except (StorageError, ProxyError) as error:
            LOG.error("Groups not checked for completion", extra={"fields": {"why": str(error)}})

    async def settle(self, group: Group) -> None:
        """Mark finished members of an open group that a crash left unmarked, and enqueue the group if it is complete."""
        rollouts = await members_of(self.store, group)
        unmarked = [
            rollout.rollout_id
            for rollout in rollouts
            if rollout.is_finished and rollout.rollout_id not in group.finished
        ]
        if unmarked:
            await mark_finished(self.store, self.clock, group, *unmarked)
        await self.complete_if_full(group.group_id)


async def members_of(store: Store, group: Group) -> list[Rollout]:
    """Return the rollouts of a group that exist, in the group's order."""
    found: list[Rollout] = []
    for start in range(0, len(group.members), _CONCURRENCY):
        names = group.members[start : start + _CONCURRENCY]
        stored = await asyncio.gather(*map(store.get, names))
        found += [read_rollout(entity) for entity in stored if entity is not None]
    return found


async def _oldest_version(store: Store, group: Group) -> str | None:
    """Return the oldest policy version that sampled a token of the group; None unless all versions are numbers."""
    oldest: int | None = None
    for rollout in await members_of(store, group):
        try:
            steps = await read_steps(store, rollout, whole=False)
        except NotFound:
            continue  # deleted meanwhile
        except DamagedStep as damage:
            LOG.error("Oldest policy version of a group is unknown", extra={"fields": {"why": damage.message}})
            return None
        for version in await aside(len(steps), lambda steps=steps: versions_of(steps)):  # type: ignore[misc]
            number = number_of(version)
            if number is None:
                return None
            oldest = number if oldest is None else min(oldest, number)
    return None if oldest is None else str(oldest)


def versions_of(steps: list[Step]) -> set[str | None]:
    """Return the policy versions that sampled tokens of these steps; None is among them if one is unknown."""
    return {span.policy_version for step in steps for choice in step.choices for span in choice.spans}
