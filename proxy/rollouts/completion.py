"""Completion of groups: a group whose members are all finished is put into the queue of each policy that is trained with it.

Every operation is idempotent. A repeated finish, and the scan of all groups when a process starts, complete what a crash left
unfinished.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import orjson
from msgspec import structs

from proxy.clock import Clock
from proxy.errors import Conflict, Damaged, NotFound
from proxy.rollouts.group import (
    Group,
    PolicyState,
    age_fields,
    find_group,
    mark_finished,
    member_fields,
    opening_of,
    state_fields,
)
from proxy.rollouts.policy import read_announced
from proxy.rollouts.rollout import SURPLUS, Rollout, first_due_ms, read_rollout, read_rollouts, write_fields
from proxy.rollouts.steps import aside, read_steps
from proxy.rollouts.stored_fields import left_out
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.facts import number_of
from proxy.trajectory.step import DEFAULT_POLICY, Step
from storage.errors import FieldsChanged
from storage.store import Store
from storage.types import StoredEntity

_CONCURRENCY = 16  # rollouts read at the same time
_SURPLUS: Final = "its over-sampled group does not need it"
Versions: TypeAlias = set[tuple[int, str | None]]  # that sampled tokens, with their epochs
FAILED: Final = ("failed", "aborted")  # statuses after which a member is replaced


@dataclass(frozen=True, slots=True)
class GroupCompletion:
    """Put groups into the queues of the policies that are `trained` once all their rollouts are finished."""

    store: Store
    clock: Clock
    metrics: Metrics
    trained: Sequence[str] = (DEFAULT_POLICY,)

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
                deadlines = rollout.deadlines_left(self.clock.now_ms())
                if attempts < group.replace and group.is_open and deadlines is not None:
                    try:
                        opened = await self._replacement(group, rollout, attempts + 1, deadlines)
                    except Damaged as damage:  # its terms are lost
                        left_out([damage], self.metrics)
                    else:
                        replaced[rollout.rollout_id] = opened
        await mark_finished(self.store, self.clock, group, [rollout.rollout_id for rollout in finished], replaced)

    async def _replacement(self, group: Group, rollout: Rollout, attempt: int, deadlines: Mapping[str, float]) -> str:
        """Open a rollout with the terms of a failed one; its ID is the same if this is repeated after a crash.

        All attempts have one deadline together.
        """
        name = f"{rollout.rollout_id.removesuffix(f'~{attempt - 1}')}~{attempt}"
        stored = await self.store.groups.get(group.group_id)
        fields = {} if stored is None else member_fields(opening_of(stored), deadlines)
        now_ms = self.clock.now_ms()
        await self.store.open(name, fields, now_ms=now_ms, timer_ms=first_due_ms(deadlines, now_ms))
        self.metrics.group_events.labels("", "replaced").inc()
        return name

    async def complete_if_full(self, group_id: str) -> None:
        """Enqueue a group if it is open and all its members are finished; concurrent calls enqueue it once."""
        group = await find_group(self.store, group_id)
        if group is None or not group.is_open or not group.is_full:
            return
        queued = await self._queued(group)
        now_ms = self.clock.now_ms()
        fields: dict[str, bytes | None] = {**write_fields({"complete_ms": now_ms})}
        notes = {}
        for policy, versions in queued.items():
            fields |= state_fields(policy, status="complete", **age_fields(*_oldest(versions)))
            notes[policy] = _note(versions)
        expect = {"status": None, "complete_ms": None}  # a group of other policies has no field status
        try:
            await self.store.queue.enqueue(group_id, notes, fields, expect=expect, now_ms=now_ms)
        except FieldsChanged:
            return  # another process has enqueued it
        for policy in queued:
            self.metrics.group_events.labels(policy, "complete").inc()

    async def requeue(self, group: Group, policy: str, *, max_staleness: int | None = None) -> Group:
        """Put a group that was dropped or is done into the queue of a policy again; return it. One that is queued is unchanged.

        Its next delivery has this `max_staleness` instead of that of the claim.

        Raises:
            Conflict: It is open, claimed, not for this policy, or queued with another `max_staleness`.
            NotFound: It was deleted.
        """
        while True:
            now_ms = self.clock.now_ms()
            state = _requeued(group, policy, max_staleness, now_ms)
            if state is None:
                return group
            versions = (await self._queued(group)).get(policy, set())
            limit = {} if max_staleness is None else {"max_staleness": max_staleness}
            values = {"why": None, "code": None, "batch_id": None, "consumer": None, "lease_ms": None}
            fields = state_fields(
                policy, status="complete", requeued=state.requeued + 1, requeued_ms=now_ms, max_staleness=max_staleness,
                acked=state.acked + (state.status == "done"), **values, **age_fields(*_oldest(versions)),
            )  # fmt: skip
            expect = state_fields(policy, status=state.status, requeued=state.requeued or None)
            notes = {policy: _note(versions, **limit)}
            try:
                stored = await self.store.queue.enqueue(group.group_id, notes, fields, expect=expect, now_ms=now_ms)
            except FieldsChanged:  # another request was first
                stored = None
            else:
                self.metrics.group_events.labels(policy, "requeued").inc(stored is not None)
            found = await find_group(self.store, group.group_id)
            if found is None:
                raise NotFound(f"Group {group.group_id!r} not found.", param="group_id")
            if stored is not None:
                return found
            group = found

    async def _queued(self, group: Group) -> dict[str, Versions]:
        """Return the policies in whose queues a group is put, each with the versions that sampled its tokens.

        They are the trained ones that have steps in the group, or all of them if that is none or unknown.
        """
        trained = self.trained or (DEFAULT_POLICY,)
        try:
            found = await _versions(self.store, group)
        except Damaged as damage:
            LOG.error("Oldest policy version of a group is unknown", extra={"fields": {"why": damage.message}})
            announced = await self.store.announcements.read()
            return {policy: {(read_announced(announced, policy).epoch, None)} for policy in trained}
        return {policy: found[policy] for policy in trained if policy in found} or {policy: set() for policy in trained}

    async def settle(self, group: Group) -> None:
        """Mark finished members of an open group that a crash left unmarked, and enqueue the group if it is complete."""
        rollouts, _ = await read_members(self.store, group, self.metrics)
        unmarked = [rollout for rollout in rollouts if rollout.is_finished and rollout.rollout_id not in group.finished]
        if unmarked:
            await self._mark(group, unmarked)
        await self.complete_if_full(group.group_id)


def _requeued(group: Group, policy: str, max_staleness: int | None, now_ms: int) -> PolicyState | None:
    """Return the state of a group that can be put into a queue again; None if it is there already. Raises Conflict."""
    name = f"Group {group.group_id!r}"
    if group.is_open:
        raise Conflict(f"{name} is open: it is queued once all its rollouts are finished.", param="group_id")
    state = group.states.get(policy)
    if state is None:
        raise Conflict(f"{name} is not for policy {policy!r}: it has no steps of it.", param="policy")
    status = state.status_at(now_ms)
    if status == "claimed":
        raise Conflict(
            f"{name} is claimed by {state.consumer!r} in batch {state.batch_id!r}: release that batch, or wait for its end.",
            param="group_id",
        )
    if status != "complete":
        return state
    if max_staleness not in (None, state.max_staleness):
        raise Conflict(f"{name} is in the queue already: claim it with this max_staleness.", param="max_staleness")
    return None


def _note(versions: Versions, **options: int) -> bytes:
    """Return what the entry of a group in a queue has for claims."""
    return orjson.dumps({**age_fields(*_oldest(versions)), **({} if versions else {"empty": True}), **options})


async def members_of(store: Store, group: Group) -> list[Rollout]:
    """Return the rollouts of a group that exist, in the group's order. Raises Damaged."""
    return [read_rollout(stored) for stored in await _stored_members(store, group)]


async def read_members(store: Store, group: Group, metrics: Metrics) -> tuple[list[Rollout], list[dict[str, str]]]:
    """Return the rollouts of a group that can be read, and the entries that name the others."""
    return read_rollouts(await _stored_members(store, group), metrics)


async def _stored_members(store: Store, group: Group) -> list[StoredEntity]:
    found: list[StoredEntity] = []
    for start in range(0, len(group.members), _CONCURRENCY):
        names = group.members[start : start + _CONCURRENCY]
        found += [stored for stored in await asyncio.gather(*map(store.get, names)) if stored is not None]
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
    return structs.replace(group, members=members, unneeded=unneeded), kept


async def _versions(store: Store, group: Group) -> dict[str, Versions]:
    """Return for each policy with steps in the group the versions that sampled its tokens. Raises Damaged."""
    found: dict[str, Versions] = {}
    for rollout in await members_of(store, group):
        try:
            steps = await read_steps(store, rollout, whole=False)
        except NotFound:
            continue  # deleted meanwhile
        for policy, versions in (await aside(len(steps), lambda steps=steps: versions_of(steps))).items():  # type: ignore[misc]
            found.setdefault(policy, set()).update(versions)
    return found


def _oldest(versions: Versions) -> tuple[str | None, int]:
    """Return the oldest version in the earliest epoch, and that epoch; None unless all versions of all epochs are numbers."""
    first = min((epoch for epoch, _ in versions), default=0)
    numbers = [(epoch, number_of(version)) for epoch, version in versions]
    known = [number for epoch, number in numbers if number is not None and epoch == first]
    return (str(min(known)) if known and all(number is not None for _, number in numbers) else None), first


def versions_of(steps: list[Step]) -> dict[str, Versions]:
    """Return by policy the epochs and versions that sampled tokens of these steps; a version is None if it is unknown."""
    found: dict[str, Versions] = {}
    for step in steps:
        found.setdefault(step.policy, set()).update(
            (span.epoch, span.policy_version) for choice in step.choices for span in choice.spans
        )
    return found
