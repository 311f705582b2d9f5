"""Completion of groups: a group whose members are all finished is put into the queue of batches.

Every operation is idempotent. A repeated finish, and the scan of all groups when a process starts, complete what a crash left
unfinished.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import orjson

from proxy.clock import Clock
from proxy.errors import DamagedStep, NotFound
from proxy.rollouts.due_times import first_due_ms
from proxy.rollouts.group import Group, find_group, mark_finished, member_fields
from proxy.rollouts.rollout import SURPLUS, Rollout, read_rollout, write_fields
from proxy.rollouts.steps import aside, read_steps
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.facts import number_of
from proxy.trajectory.step import Step
from storage.errors import FieldsChanged
from storage.store import Store

_CONCURRENCY = 16  # rollouts read at the same time
_SURPLUS: Final = "its over-sampled group does not need it"
FAILED: Final = ("failed", "aborted")  # statuses after which a member is replaced


@dataclass(frozen=True, slots=True)
class GroupCompletion:
    """Put groups into the queue once all their rollouts are finished."""

    store: Store
    clock: Clock
    metrics: Metrics

    async def member_finished(self, rollout: Rollout) -> Group | None:
        """Mark a rollout as finished in its group, or replace it, and enqueue the group if it is complete now.

        Returns the group as it was before; None if the rollout is not a member of one.
        """
        if rollout.group_id is None:
            return None
        group = await find_group(self.store, rollout.group_id)
        if group is None or rollout.rollout_id not in group.members:
            return None
        await self._mark(group, [rollout])
        await self.complete_if_full(rollout.group_id)
        return group

    async def _mark(self, group: Group, finished: list[Rollout]) -> None:
        """Mark members as finished, together with the replacements of those that failed, so that the group is not full."""
        replaced = {}
        for rollout in finished:
            if rollout.status in FAILED and rollout.reason != SURPLUS and rollout.rollout_id not in group.replaced:
                attempts = group.attempts(rollout.rollout_id)
                if attempts < group.replace and group.status == "open":
                    replaced[rollout.rollout_id] = await self._replacement(group, rollout, attempts + 1)
        await mark_finished(self.store, self.clock, group, [rollout.rollout_id for rollout in finished], replaced)

    async def _replacement(self, group: Group, rollout: Rollout, attempt: int) -> str:
        """Open a rollout with the terms of a failed one; its ID is the same if this is repeated after a crash."""
        name = f"{rollout.rollout_id.removesuffix(f'~{attempt - 1}')}~{attempt}"
        stored = await self.store.groups.get(group.group_id)
        fields = {} if stored is None else member_fields(orjson.loads(stored.fields["opened_with"]))
        now_ms = self.clock.now_ms()
        timer_ms = first_due_ms({"deadline_s": rollout.deadline_s, "idle_s": rollout.idle_s}, now_ms)
        await self.store.open(name, fields, now_ms=now_ms, timer_ms=timer_ms)
        self.metrics.group_events.labels("replaced").inc()
        return name

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

    async def settle(self, group: Group) -> None:
        """Mark finished members of an open group that a crash left unmarked, and enqueue the group if it is complete."""
        rollouts = await members_of(self.store, group)
        unmarked = [rollout for rollout in rollouts if rollout.is_finished and rollout.rollout_id not in group.finished]
        if unmarked:
            await self._mark(group, unmarked)
        await self.complete_if_full(group.group_id)


async def members_of(store: Store, group: Group) -> list[Rollout]:
    """Return the rollouts of a group that exist, in the group's order."""
    found: list[Rollout] = []
    for start in range(0, len(group.members), _CONCURRENCY):
        names = group.members[start : start + _CONCURRENCY]
        stored = await asyncio.gather(*map(store.get, names))
        found += [read_rollout(entity) for entity in stored if entity is not None]
    return found


def counted(group: Group, rollouts: Sequence[Rollout]) -> tuple[Group, list[Rollout]]:
    """Return the group without the members that it does not need, and the rollouts of the others.

    It does not need those that were replaced or are surplus. Of an over-sampled group the `size` members count that were
    finished first and have a reward.
    """
    unneeded = {old: f"it failed and was replaced by {new!r}" for old, new in group.replaced.items()}
    unneeded |= {rollout.rollout_id: _SURPLUS for rollout in rollouts if rollout.reason == SURPLUS}
    kept = [rollout for rollout in rollouts if rollout.rollout_id not in unneeded]
    rewarded = [rollout for rollout in kept if rollout.is_finished and rollout.reward is not None]
    if group.over_sample and len(rewarded) >= (group.size or 0):
        first = sorted(rewarded, key=lambda rollout: (rollout.finished_ms or 0, rollout.rollout_id))[: group.size]
        unneeded |= {rollout.rollout_id: _SURPLUS for rollout in kept if rollout not in first}
        kept = [rollout for rollout in kept if rollout in first]
    members = tuple(name for name in group.members if name not in unneeded)
    return replace(group, members=members, unneeded=unneeded), kept


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
