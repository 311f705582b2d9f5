"""The finish of rollouts: by a request, or by TokenTape at a deadline or as surplus; and the completion of their groups.

Once all members of a group are finished, it is put into the queue of each policy that is trained with it. Every operation is
idempotent: a repeated finish, and the scan of all groups when a process starts, complete what a crash left unfinished.

A rollout is finished at its deadline if it is older than `deadline_s`, had no call in flight for `idle_s` since its first one,
or had no call for `start_s`.

Rule 1: the rollout in the store decides: its age, and `touched_ms`, which each call sets when it begins and when its step is
        stored. Timers in the store are only the times at which some process looks at a rollout.
Rule 2: every process claims expired timers and looks at their rollouts. It removes a timer after the rollout is finished and
        its group is complete; if the process dies before, the timer expires again, and another process completes the work.
Rule 3: a process touches the rollouts with `idle_s` that have calls in flight (`renewals`). A quiet rollout is finished only if
        it was not touched since it was read. So if a call and a finish coincide, the store applies one of them first: either
        the rollout stays open, or the call is rejected (docs/decisions/013).
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from proxy.clock import Clock
from proxy.errors import Conflict, Damaged, NotFound, ProxyError
from proxy.rollouts.drift import DriftReporter
from proxy.rollouts.group import (
    Group,
    PolicyState,
    age_fields,
    find_group,
    in_places,
    is_rewarded,
    lacks_reward,
    mark_finished,
    member_fields,
    members_of,
    opening_of,
    read_group,
    read_members,
    state_fields,
)
from proxy.rollouts.playback import TAKEN_OVER, Tapes
from proxy.rollouts.policy import read_announced
from proxy.rollouts.rollout import (
    DEADLINE,
    SURPLUS,
    Rollout,
    first_due_ms,
    is_past_deadline,
    left_out,
    no_rollout,
    read_rollout,
    write_fields,
)
from proxy.rollouts.steps import NO_VERSIONS, Versions, aside, read_steps, versions_of
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.facts import number_of
from proxy.trajectory.step import DEFAULT_POLICY, Step
from proxy.upstream.concurrency import BackgroundWork
from storage.errors import FieldsChanged, StorageError
from storage.redis.store import Store
from storage.types import StoredEntity, Timer

FAILED: Final = ("failed", "aborted")  # statuses after which a member is replaced
_SETTLE_AGAIN_S: Final = 5.0
_INTERVALS_S: Final = (0.75, 1.0)  # between sweeps, of one process at a time
_WAITS: Final = 4  # intervals of the other processes
_LOOK_INTERVAL_S: Final = 30.0  # between looks for what the index lacks
_REPAIR_S: Final = 0.1  # of each sweep
_AFTER_FAILURE_S: Final = 5.0  # processes with calls in flight touch their rollouts first
_LEASE_MS: Final = 10_000  # of a claimed timer
_TIMERS_PER_CLAIM: Final = 128  # of all buckets of the store
_FINISHES_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Finisher:
    """Finish rollouts, each once, across processes, and put their groups into the queues of the policies that are `trained`."""

    store: Store
    clock: Clock
    metrics: Metrics
    drift: DriftReporter
    tapes: Tapes
    trained: Sequence[str] = (DEFAULT_POLICY,)
    traced: Callable[[Rollout], None] | None = None  # called with each rollout that this process finishes

    async def finish(
        self,
        rollout: Rollout,
        status: str,
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        reason: str | None = None,
        touched_ms: int | None = None,
    ) -> Rollout:
        """Finish a rollout, or return it if it is finished with the same status and reward.

        `reason` is stored if TokenTape finishes the rollout itself. If `touched_ms` is given and the rollout was touched since,
        it is returned unfinished.

        Raises:
            Conflict: The rollout is finished with another status or reward.
            NotFound: The rollout was deleted meanwhile.
        """
        name = rollout.rollout_id
        while not rollout.is_finished:
            now_ms = self.clock.now_ms()
            values = {"status": status, "finished_ms": now_ms, "reward": reward, "metadata": metadata, "reason": reason}
            fields = write_fields(values)
            expect = write_fields({"status": rollout.status}) if rollout.status != "open" else {"status": None}
            try:
                stored = await self.store.update_if(name, fields, expect=expect, now_ms=now_ms, touched_ms=touched_ms)
            except FieldsChanged as changed:
                rollout = read_rollout(changed.rollout)  # another process changed it: decide again
                if touched_ms not in (None, rollout.touched_ms) and not rollout.is_finished:
                    return rollout
                continue
            if stored is None:
                raise no_rollout(name)
            rollout = read_rollout(stored)
            if reason == DEADLINE:
                self.metrics.deadline_rollouts.inc()
            if self.traced is not None:
                self.traced(rollout)
            await self.after_finish(rollout)
            return rollout
        if rollout.status != status:
            raise Conflict(f"Rollout {name!r} already has status {rollout.status!r}.", param="status")
        if reward not in (None, rollout.reward):
            raise Conflict(
                f"Rollout {name!r} already has reward {rollout.reward}. Use PATCH to change it.", param="reward"
            )
        await self.after_finish(rollout, again=True)
        return rollout

    async def rewarded(self, rollout: Rollout) -> None:
        """Finish the members that an over-sampled group does not need, once enough of its finished members have a reward."""
        if rollout.is_over_sampled and rollout.is_finished and rollout.group_id is not None:
            try:
                await self.finish_surplus(rollout.group_id)
            except Damaged as damage:  # the reward is stored all the same
                left_out([damage], self.metrics)

    async def replacement(self, rollout: Rollout) -> StoredEntity | None:
        """Return the rollout that was opened in place of a failed one, if there is one and its group can be read."""
        if rollout.group_id is None or rollout.status not in FAILED:
            return None
        try:
            group = await find_group(self.store, rollout.group_id)
        except Damaged:
            return None
        name = None if group is None else group.replaced.get(rollout.rollout_id)
        return None if name is None else await self.store.get(name)

    async def finish_surplus(self, group_id: str) -> None:
        """Finish the open members of an over-sampled group if `size` of the others have a reward."""
        group = await find_group(self.store, group_id)
        if group is None or not group.is_open or not group.over_sample or group.size is None:
            return
        members, _ = await read_members(self.store, group, self.metrics)
        rollouts = [rollout for rollout in in_places(group, members) if rollout.rollout_id not in group.replaced]
        if sum(map(is_rewarded, rollouts)) < group.size:
            return
        for rollout in rollouts:
            if not rollout.is_finished:
                with suppress(Conflict, NotFound):  # finished, deleted or damaged at this moment
                    await self.finish(rollout, "aborted", reason=SURPLUS)

    async def settle(self, group: Group) -> None:
        """Complete what a crash left of the finishes of an open group's members."""
        rollouts, _ = await read_members(self.store, group, self.metrics)
        unmarked = [rollout for rollout in rollouts if rollout.is_finished and rollout.rollout_id not in group.finished]
        if unmarked:
            await self._mark(group, unmarked)
        await self._complete_if_full(group.group_id)
        if group.over_sample:
            await self.finish_surplus(group.group_id)

    async def settle_all(self) -> None:
        """Settle every group that is open because a process died; from the start again if the store fails meanwhile."""
        while True:
            try:
                async for group_id in self.store.groups.names():
                    try:
                        stored = await self.store.groups.get(group_id)
                        if stored is None or not read_group(stored).is_open:
                            continue  # most groups: their members are not read
                        group = await find_group(self.store, group_id)
                        if group is not None and group.is_open and group.size is not None:
                            await self.settle(group)
                    except ProxyError as error:  # of this group only
                        fields = {"group_id": group_id, "why": str(error)}
                        LOG.error("Group not checked for completion", extra={"fields": fields})
            except StorageError as error:
                LOG.error("Groups not checked for completion", extra={"fields": {"why": str(error)}})
                await asyncio.sleep(_SETTLE_AGAIN_S)
            else:
                return

    async def after_finish(self, rollout: Rollout, *, again: bool = False) -> None:
        """Count the drift of a finished rollout, complete its group if it was the last one, and remove its timer.

        `again`: the rollout was finished before, by a process that may have died before it did this.
        """
        if again:
            self.drift.complete(rollout)
        else:
            self.drift.settle(rollout.rollout_id)
        try:
            group = None if rollout.group_id is None else await find_group(self.store, rollout.group_id)
            if group is not None and rollout.rollout_id in group.members:
                await self._mark(group, [rollout])
                await self._complete_if_full(group.group_id)
                if rollout.is_over_sampled and rollout.reason != SURPLUS:
                    await self.finish_surplus(group.group_id)
        except Damaged as damage:  # the rollout is finished all the same
            left_out([damage], self.metrics)
        if (rollout.deadline_s, rollout.idle_s, rollout.start_s) != (None, None, None):
            with suppress(StorageError):  # it expires, and is removed then
                await self.store.timers.remove(Timer(rollout.rollout_id, rollout.incarnation))

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

        All attempts have one deadline together. In a group with `replay` it plays the failed one back; a playback without a
        live step is opened again as it was.
        """
        name = f"{rollout.rollout_id.removesuffix(f'~{attempt - 1}')}~{attempt}"
        stored = await self.store.groups.get(group.group_id)
        fields = {} if stored is None else member_fields(opening_of(stored), deadlines)
        fields = {**await self._tape(group, rollout), **fields}
        now_ms = self.clock.now_ms()
        await self.store.open(name, fields, now_ms=now_ms, timer_ms=first_due_ms(deadlines, now_ms))
        self.metrics.group_events.labels("", "replaced").inc()
        return name

    async def _tape(self, group: Group, rollout: Rollout) -> Mapping[str, bytes]:
        """Return what answers the calls of a rollout in place of a failed one, and the terms that come with it."""
        own, counts = rollout.playback, rollout.counts
        if group.replay is not None and counts.get("steps", 0) > counts.get("inherited", 0):
            ignore = [*group.replay["ignore"], *(() if own is None else own.ignore)]
            terms = {**group.replay, "of": rollout.rollout_id, "on_mismatch": "sample", "ignore": ignore}
            with suppress(NotFound):
                return await self.tapes.open(terms)
        known = rollout.origin.fields
        return {} if own is None else {name: known[name] for name in ("playback", *TAKEN_OVER) if name in known}

    async def _complete_if_full(self, group_id: str) -> None:
        """Enqueue a group if it is open and all its members are finished; concurrent calls enqueue it once."""
        group = await find_group(self.store, group_id)
        if group is None or not group.is_open or not group.is_full:
            return
        queued, rewarded = await self._queued(group)
        now_ms = self.clock.now_ms()
        fields: dict[str, bytes | None] = {**write_fields({"complete_ms": now_ms})}
        notes = {}
        for policy, versions in queued.items():
            fields |= state_fields(policy, status="complete", **age_fields(*_oldest(versions)))
            notes[policy] = _note(versions, **rewarded)
        expect = {"status": None, "complete_ms": None}  # a group of other policies has no field status
        try:
            await self.store.queue.enqueue(group_id, notes, fields, expect=expect, now_ms=now_ms)
        except FieldsChanged:
            return  # another process has enqueued it
        for policy in queued:
            self.metrics.group_events.labels(policy, "complete").inc()

    async def requeue(self, group: Group, policy: str, *, max_staleness: int | None = None) -> Group:
        """Put a group that was dropped or is done into the queue of a policy again; return it. One that is queued is unchanged.

        Its next delivery uses this `max_staleness` instead of the claim's.

        Raises:
            Conflict: It is open, claimed, not for this policy, or queued with another `max_staleness`.
            NotFound: It was deleted.
        """
        while True:
            now_ms = self.clock.now_ms()
            state = _requeued(group, policy, max_staleness, now_ms)
            if state is None:
                return group
            queued, rewarded = await self._queued(group)
            versions = queued.get(policy, NO_VERSIONS)
            limit = {} if max_staleness is None else {"max_staleness": max_staleness}
            values = {"why": None, "code": None, "batch_id": None, "consumer": None, "lease_ms": None}
            fields = state_fields(
                policy, status="complete", requeued=state.requeued + 1, requeued_ms=now_ms, max_staleness=max_staleness,
                acked=state.acked + (state.status == "done"), **values, **age_fields(*_oldest(versions)),
            )  # fmt: skip
            expect = state_fields(policy, status=state.status, requeued=state.requeued or None)
            notes = {policy: _note(versions, **limit, **rewarded)}
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

    async def _queued(self, group: Group) -> tuple[dict[str, Versions], dict[str, bool]]:
        """Return the policies that get a group in their queues, each with the versions that sampled its tokens.

        These are the trained policies with steps in the group; all trained policies if none has steps, or if the group is
        damaged. Also return what notes have of the rewards.
        """
        trained = self.trained or (DEFAULT_POLICY,)
        try:
            rollouts = await members_of(self.store, group)
            found = await _versions(self.store, rollouts)
        except Damaged as damage:
            LOG.error("Oldest policy version of a group is unknown", extra={"fields": {"why": damage.message}})
            announced = await self.store.announcements.read()
            return {policy: frozenset({(read_announced(announced, policy).epoch, None)}) for policy in trained}, {}
        rewarded = {} if any(map(lacks_reward, rollouts)) else {"rewarded": True}
        versions = {policy: found[policy] for policy in trained if policy in found}
        return versions or dict.fromkeys(trained, NO_VERSIONS), rewarded


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


async def _versions(store: Store, rollouts: Sequence[Rollout]) -> dict[str, Versions]:
    """Return for each policy with live steps in a group's rollouts the versions that sampled its tokens. Raises Damaged."""
    found: dict[str, Versions] = {}
    for rollout in rollouts:
        try:
            steps = await read_steps(store, rollout, whole=False)
        except NotFound:
            continue  # deleted meanwhile
        for policy, versions in (await aside(len(steps), partial(_live_versions, steps))).items():
            found[policy] = found.get(policy, NO_VERSIONS) | versions
    return found


def _oldest(versions: Versions) -> tuple[str | None, int]:
    """Return the oldest version in the earliest epoch, and that epoch; None unless all versions of all epochs are numbers."""
    first = min((epoch for epoch, _ in versions), default=0)
    numbers = [(epoch, number_of(version)) for epoch, version in versions]
    known = [number for epoch, number in numbers if number is not None and epoch == first]
    return (str(min(known)) if known and all(number is not None for _, number in numbers) else None), first


def _live_versions(steps: Iterable[Step]) -> dict[str, Versions]:
    """Return by policy the versions that sampled tokens of the live steps: the source of the others is trained with them."""
    return versions_of(step for step in steps if step.inherited is None)


class Deadlines(BackgroundWork):
    """Finish the rollouts of the store that are past their deadlines, and repair the store's index.

    Call `close` before the store is closed.
    """

    def __init__(self, finisher: Finisher) -> None:
        self._finisher = finisher
        self._random = random.Random()  # noqa: S311 - no secret; of its own, so that it changes no state of other code
        self._look_at_s = finisher.clock.monotonic() + _LOOK_INTERVAL_S
        self._is_repairing = False

    async def sweep(self) -> None:
        """Look at each rollout with an expired timer. Raises StorageError."""
        limit = max(1, _TIMERS_PER_CLAIM // len(self._finisher.store.layout.buckets))
        while True:
            now_ms = self._finisher.clock.now_ms()
            until_ms = now_ms + _LEASE_MS
            timers = await self._finisher.store.timers.claim(limit, now_ms=now_ms, until_ms=until_ms)
            if not timers:
                return
            for start in range(0, len(timers), _FINISHES_AT_ONCE):
                await self._look_at(timers[start : start + _FINISHES_AT_ONCE], until_ms)

    async def _look_at(self, timers: list[Timer], until_ms: int) -> None:
        """Finish those rollouts that are due, and set the timers of the others. Raises StorageError."""
        found = await asyncio.gather(*(self._next_ms(timer, until_ms) for timer in timers), return_exceptions=True)
        times: dict[Timer, int | None] = {}
        failure: StorageError | None = None
        for timer, next_ms in zip(timers, found, strict=True):
            if not isinstance(next_ms, BaseException):
                times[timer] = next_ms
            elif isinstance(next_ms, StorageError):
                failure = next_ms
            else:  # of this rollout only: it is looked at again when the claim of its timer ends
                LOG.error("Deadline not enforced", exc_info=next_ms, extra={"fields": {"rollout_id": timer.rollout}})
        await self._finisher.store.timers.move(times, from_ms=until_ms)
        if failure is not None:
            raise failure

    async def _next_ms(self, timer: Timer, until_ms: int) -> int | None:
        """Finish a rollout if it is due; return when to look at it again, None for never."""
        stored = await self._finisher.store.get(timer.rollout)
        if stored is None or stored.incarnation != timer.incarnation:
            return None
        try:
            rollout = read_rollout(stored)
        except Damaged as damage:
            left_out([damage], self._finisher.metrics)
            return until_ms
        if rollout.is_finished:  # the process that finished it may have died before it completed the group
            await self._finisher.after_finish(rollout, again=True)
            return None
        due, now_ms = rollout.due_ms, self._finisher.clock.now_ms()
        if due is None or due > now_ms:
            return rollout.next_look_ms(now_ms)
        seen_ms = None if is_past_deadline(rollout, now_ms) else rollout.touched_ms
        try:
            rollout = await self._finisher.finish(rollout, "aborted", reason=DEADLINE, touched_ms=seen_ms)
        except Conflict:
            return until_ms  # finished otherwise at this moment; look whether its group is complete
        except NotFound:
            return None
        return None if rollout.is_finished else rollout.next_look_ms(now_ms)

    async def _repair_index(self) -> None:
        """Correct what a process of 0.1.0 wrote to the store, in a tenth of the time. Raises StorageError."""
        clock, listing = self._finisher.clock, self._finisher.store.listing
        now_s = clock.monotonic()
        if self._look_at_s <= now_s:
            self._look_at_s = now_s + _LOOK_INTERVAL_S
            await listing.look_for_repairs()
            self._is_repairing = True
        while self._is_repairing and clock.monotonic() < now_s + _REPAIR_S:
            self._is_repairing = await listing.repair(clock.now_ms())

    async def _has_turn(self) -> bool:
        """Return whether this process sweeps now, as the only one unless the first bucket is unreachable."""
        try:
            return await self._finisher.store.timers.has_turn(max(1, int(_INTERVALS_S[0] * 900)))
        except StorageError:
            return True

    async def _run(self) -> None:
        intervals = 1
        while True:
            await asyncio.sleep(intervals * self._random.uniform(*_INTERVALS_S))
            try:
                intervals = 1 if await self._has_turn() else _WAITS
                if intervals == 1:
                    await self.sweep()
                    await self._repair_index()
            except StorageError as error:
                self._finisher.metrics.store_operation_failures.labels("deadlines").inc()
                LOG.warning("Deadlines of rollouts not checked: %s", error)
                await asyncio.sleep(_AFTER_FAILURE_S)
