"""The recorder: encodes steps, appends each to the store in one round trip, and counts it.

A step is durable when `record` returns; a step passed to `record_detached` is written by a background task, for which `close`
waits.

Rule 1: the end of a response is sent only after `record` returned.
Rule 2: a step is appended once, also by repeated requests: the store knows its name. While the store is unreachable, the step
        is durable in the journal, if there is one.
Rule 3: steps of one rollout are stored in the order in which they ended, since their callers wait for each.
Rule 4: a step that is stored after its rollout was finished is late, by the write that stores it (docs/decisions/006).
        If the rollout has expired, a step restores it; if it was deleted, the step is not stored. Each is counted.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TypeAlias, TypeVar

import orjson
from msgspec import structs

from proxy.clock import Clock
from proxy.errors import Damaged, ProxyError, StoreUnavailable
from proxy.rollouts.outages import Journal, StoreHealth
from proxy.rollouts.policy import unknown_staleness
from proxy.rollouts.rollout import (
    BEGAN_FIELD,
    DELIVERED_MARK,
    HTTP_COUNT,
    POLICY_FIELD,
    TASK_FIELD,
    UNDELIVERED_MARK,
    LiveRollout,
    LiveRollouts,
    no_rollout,
    read_rollout,
)
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import Record, UnreadableRecord, decode, encode_leniently
from proxy.trajectory.step import CACHED_TOKENS, INHERITED, Step
from proxy.upstream.concurrency import PLAIN_BYTES, BackgroundTasks
from storage.errors import MissingBlocks, RolloutDeleted, RolloutExpired, StorageError, StoreUnreachable
from storage.redis.store import Store
from storage.types import Appended, Origin, StepWrite, StoredEntity

T = TypeVar("T")
Follower: TypeAlias = Callable[[Step, LiveRollout, Appended, int], None]

_ENCODE_IN_THREAD_FROM_ITEMS = 2**10  # as long: each message is a block, with a hash of its own


_TASK_CHARACTERS = 120
FINISHED_FIELD = "finished_ms"  # of a rollout: steps stored from then on are late
CLAIMED_FIELD = "claimed_by"


class Recorder:
    """Write steps to the store. Call `close` at the end.

    `followers` are called with each stored step, its rollout, the result and `body_bytes`, `late_followers`
    with those that were stored after the finish, when the callback of the call has run; they must not block.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        clock: Clock,
        journal: Journal | None = None,
        rollouts: LiveRollouts | None = None,
    ) -> None:
        self.followers: list[Follower] = []
        self.late_followers: list[Follower] = []
        self._rollouts = rollouts
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._seconds = metrics.store_operation_duration_seconds.labels("append")
        self._warned: set[str] = set()  # policies
        self._numbers: tuple[str | None, ...] = (None,)  # versions that need no warning: none, and the newest
        self.tasks = BackgroundTasks()
        self._journal = journal
        self.has_journal = journal is not None
        self.detached_bytes = 0  # of steps that are not written yet although their calls have ended
        self.store_health = StoreHealth(store, metrics, self._replay)
        if journal is not None:
            metrics.journal_steps.set_function(lambda: journal.pending)
            if journal.pending:
                self.store_health.probe()

    def __repr__(self) -> str:
        return f"<Recorder {len(self.tasks)} waiting>"

    @property
    def journaled(self) -> int | None:
        """The number of steps in the journal; None without a journal."""
        return None if self._journal is None else self._journal.pending

    async def record(self, step: Step, live: LiveRollout, *, body_bytes: int, work_bytes: int) -> None:
        """Store a step. Raises StoreUnavailable; steps of a deleted rollout are discarded and counted.

        `body_bytes` is the approximate length of request and response. `work_bytes` do not repeat the call before: many are
        encoded in a thread. If the caller is cancelled meanwhile, the step is stored nevertheless, and marked as undelivered.
        """
        task = None
        try:
            if self._journal is None:
                await self._append(step, live, body_bytes, work_bytes)  # without a task, which takes 9 µs
            else:  # a write to the journal must not be cancelled
                task = self.tasks.start(self._append(step, live, body_bytes, work_bytes))
                await asyncio.shield(task)
        except asyncio.CancelledError:
            if task is None:  # once more, from the start: if the store has the step already, it is not stored again
                task = self.tasks.start(self._append(step, live, body_bytes, work_bytes))
            self._track_bytes(task, body_bytes)
            self.tasks.start(self._mark_undelivered_after(task, step, live.rollout.incarnation))
            raise
        finally:
            del task  # its error and this frame refer to each other

    def record_detached(self, step: Step, live: LiveRollout, *, body_bytes: int) -> None:
        """Store a step in the background: its client has disconnected."""
        self._track_bytes(self.tasks.start(self._append_detached(step, live, body_bytes)), body_bytes)

    def mark_undelivered(self, step: Step, incarnation: str) -> None:
        """Mark a stored step as undelivered: its client disconnected before the end was written."""
        self.tasks.start(self._mark_undelivered_after(None, step, incarnation))

    def mark_delivered(self, rollout_id: str, incarnation: str, step_id: str) -> None:
        """Mark a step as delivered: its stored response was sent to a retry, completely."""
        self.tasks.start(self._mark(rollout_id, incarnation, DELIVERED_MARK + step_id))

    async def close(self) -> None:
        """Wait until all steps are written."""
        await self.tasks.wait()
        await self.store_health.close()
        if self._journal is not None:
            self._journal.close()

    async def _replay(self) -> None:
        """Append the journal's entries to the store. Raises StorageError; the remaining entries stay in the journal."""
        if self._journal is not None:
            await self._journal.replay(
                self._append_from_journal, lambda rollout: self.store_health.reason(rollout) is None
            )

    async def _append_from_journal(self, entry: StepWrite) -> None:
        now_ms = self._clock.now_ms()
        if not entry.record:  # an entry without a record is a mark
            with suppress(RolloutDeleted):
                await self._store.mark(entry.rollout, entry.incarnation, {entry.name: b"1"}, now_ms=now_ms)
            return
        stored = await self._store.get(entry.rollout)
        late_if = await asyncio.to_thread(_late_if, entry, stored)
        entry = structs.replace(entry, late_if=late_if, origin=entry.origin or Origin(now_ms))
        try:
            appended = await self._store.append(entry, now_ms=now_ms)
        except RolloutDeleted:
            self._discard(entry.name)
        else:
            if appended.is_late or appended.is_restored:
                self._note(entry, appended)

    async def _write_to_journal(self, step: Step, live: LiveRollout, body_bytes: int, journal: Journal) -> None:
        """Write a step to the journal with all its blocks: the store may not have them at replay."""
        step, record = await _encoded(step, set(), body_bytes)
        entry = entry_of(step, live.rollout.incarnation, record, live.rollout.origin)
        try:
            await self._write_entry(journal, entry)
        except OSError as error:
            raise StoreUnavailable(
                f"The step could not be stored, neither in the store nor in the journal: {error}"
            ) from error
        self._count(step, entry)

    async def _write_entry(self, journal: Journal, entry: StepWrite) -> None:
        """Write an entry to the journal. Raises OSError."""
        await journal.write(entry)
        self.store_health.probe()  # the replay of the others may have ended while this was written

    def _track_bytes(self, task: "asyncio.Task[None]", body_bytes: int) -> None:
        """Count the bytes of a step from the end of its call until the step is written."""

        def release(_: "asyncio.Task[None]") -> None:
            self.detached_bytes -= body_bytes

        self.detached_bytes += body_bytes
        task.add_done_callback(release)

    async def _append(self, step: Step, live: LiveRollout, body_bytes: int, work_bytes: int) -> None:
        if step.timing.stored is None:
            step = replace(step, timing=replace(step.timing, stored=self._clock.now()))
        rollout, journal = step.rollout_id, self._journal
        if journal is not None and (rollout in journal or self.store_health.reason(rollout) is not None):
            await self._write_to_journal(step, live, body_bytes, journal)  # behind its entries, to keep the order
            return
        try:
            stored, entry, appended = await self._stored(step, live, body_bytes, work_bytes)
        except RolloutDeleted:
            self._discard(step.step_id)
            return
        except StorageError as error:
            if journal is not None and isinstance(error, StoreUnreachable):
                await self._write_to_journal(step, live, body_bytes, journal)
                return
            raise StoreUnavailable(
                f"The step could not be stored, so the end of the response is withheld: {error}"
            ) from error
        self._count(stored, entry)
        # After the callback of the call, and before callbacks of later events: the next call of the agent finds the step.
        asyncio.get_running_loop().call_soon(self._follow, stored, live, appended, body_bytes)

    async def append_new(self, step: Step, live: LiveRollout, *, body_bytes: int, work_bytes: int) -> bool:
        """Store an inherited step; return false if the store has one with its id, which another call has stored.

        Raises NotFound: the rollout was deleted; StoreUnavailable: it is unknown which steps of a tape are used.
        """
        try:
            stored, entry, appended = await self._stored(step, live, body_bytes, work_bytes)
            if not appended.is_new:  # equal bytes: the response to the first attempt of this append was lost
                found = await self._store.find(step.rollout_id, step.step_id)
                return found is not None and found[1] == entry.record
        except RolloutDeleted:
            raise no_rollout(step.rollout_id) from None
        except StorageError as error:
            raise StoreUnavailable(f"The step could not be stored, so the call is not answered: {error}") from error
        asyncio.get_running_loop().call_soon(self._follow, stored, live, appended, body_bytes)
        return True

    async def _stored(
        self, step: Step, live: LiveRollout, body_bytes: int, work_bytes: int
    ) -> tuple[Step, StepWrite, Appended]:
        """Append a step; return it as it is stored. Raises StorageError."""
        known, incarnation = live.blocks, live.rollout.incarnation
        is_first = not known  # of this process: the store knows whether it is the rollout's first one
        step, record = await _encoded(step, known, work_bytes, live.large_work)
        started = self._clock.monotonic()
        try:
            entry = entry_of(step, incarnation, record, is_first=is_first)
            try:
                appended = await self._store.append(entry, now_ms=self._clock.now_ms())
            except (MissingBlocks, RolloutExpired):
                # The rollout has expired, and its blocks with it; or the store lost blocks that are known here.
                step, record = await _encoded(step, set(), body_bytes)
                entry = entry_of(step, incarnation, record, live.rollout.origin)
                appended = await self._store.append(entry, now_ms=self._clock.now_ms())
        except RolloutDeleted:
            raise
        except StorageError as error:
            self._metrics.store_operation_failures.labels("append").inc()
            self.store_health.failed(error)
            raise
        finally:
            self._seconds.observe(self._clock.monotonic() - started)
        known.update(record.blocks)
        known.update(record.names)
        if appended.is_late or appended.is_restored:
            self._note(entry, appended)
        return step, entry, appended

    def _follow(self, step: Step, live: LiveRollout, appended: Appended, body_bytes: int) -> None:
        for follow in (*self.followers, *self.late_followers) if appended.is_late else self.followers:
            follow(step, live, appended, body_bytes)
        if self._rollouts is not None:
            self._rollouts.keep(live)

    def _note(self, entry: StepWrite, appended: Appended) -> None:
        """Count and log a late step, or a restored rollout."""
        fields = {"rollout_id": entry.rollout, "step_id": entry.name}
        if appended.is_late:
            self._metrics.late_steps.inc()
            LOG.info("Step stored after its rollout was finished", extra={"fields": fields})
        if appended.is_restored:
            self._metrics.restored_rollouts.inc()
            LOG.warning("Expired rollout restored by a late step (store.ttl_s)", extra={"fields": fields})

    def _discard(self, step_id: str) -> None:
        self._metrics.discarded_steps.inc()
        LOG.info("Step discarded because its rollout was deleted", extra={"fields": {"step_id": step_id}})

    async def _append_detached(self, step: Step, live: LiveRollout, body_bytes: int) -> None:
        try:
            await self._append(step, live, body_bytes, body_bytes)
        except ProxyError as error:
            LOG.error("Partial step lost: %s", error, extra={"fields": {"step_id": step.step_id}})

    async def _mark_undelivered_after(self, after: "asyncio.Task[None] | None", step: Step, incarnation: str) -> None:
        if after is not None:
            await asyncio.wait([after])
            if after.exception() is not None:
                return  # not stored, so there is nothing to mark
        if await self._mark(step.rollout_id, incarnation, UNDELIVERED_MARK + step.step_id):
            self._metrics.undelivered_steps.inc()

    async def _mark(self, rollout_id: str, incarnation: str, mark: str) -> bool:
        """Set a mark; return whether it is set, or in the journal."""
        try:
            try:
                self.store_health.check(rollout_id)
                await self._store.mark(rollout_id, incarnation, {mark: b"1"}, now_ms=self._clock.now_ms())
            except StoreUnreachable as error:
                self._metrics.store_operation_failures.labels("mark").inc()
                self.store_health.failed(error)
                if self._journal is None:
                    raise
                await self._write_entry(self._journal, StepWrite(rollout_id, incarnation, mark, b"", {}, (), {}))
        except RolloutDeleted:
            return False  # deleted meanwhile, the step with it
        except (StorageError, OSError) as error:
            LOG.error("Step not marked: %s", error, extra={"fields": {"rollout_id": rollout_id, "mark": mark}})
            return False
        return True

    def _count(self, step: Step, entry: StepWrite) -> None:
        metrics, counts = self._metrics, entry.counts
        fidelity = "exact" if "exact" in counts else "flagged" if "flagged" in counts else "error"
        metrics.steps.labels(step.status, fidelity).inc()
        metrics.completion_tokens.labels(step.engine.name).inc(counts["sampled_tokens"])
        metrics.prompt_tokens.labels(step.engine.name).inc(counts["prompt_tokens"])
        if "cached_tokens" in counts:
            metrics.cached_prompt_tokens.labels(step.engine.name).inc(counts["cached_tokens"])
        for code in step.problems:
            metrics.fidelity_problems.labels(code).inc()
        for choice in step.choices:
            for span in choice.spans:
                if span.policy_version not in self._numbers:
                    self._check_versions(step)
                    return

    def _check_versions(self, step: Step) -> None:
        """Count a step if the version of its tokens is not a number, and log the first such step of each policy."""
        for choice in step.choices:
            for span in choice.spans:
                if span.policy_version in self._numbers:
                    continue
                warning = unknown_staleness(span.policy_version)
                if warning is None:
                    self._numbers = (None, span.policy_version)
                else:
                    self._metrics.unknown_version_steps.labels(step.policy).inc()
                    if step.policy not in self._warned:
                        self._warned.add(step.policy)
                        LOG.warning(warning, extra={"fields": {"policy": step.policy, "step_id": step.step_id}})
                    return


async def _encoded(
    step: Step, known: set[bytes], work_bytes: int, alone: asyncio.Lock | None = None
) -> tuple[Step, Record]:
    """Return the step as it is stored, and its record.

    Large steps are encoded `alone`: those after the first one have its blocks, stored or not.
    """
    items = 0
    for value in step.request.values():
        if isinstance(value, list):
            items += len(value)
    if work_bytes < PLAIN_BYTES and items < _ENCODE_IN_THREAD_FROM_ITEMS:
        return encode_leniently(step, known)
    async with alone or nullcontext():
        return await asyncio.to_thread(encode_leniently, step, known)


def entry_of(
    step: Step, incarnation: str, record: Record, origin: Origin | None = None, *, is_first: bool = True
) -> StepWrite:
    """Return what is stored of a step together with its record. `is_first`: the rollout may have no step yet."""
    sampled = 0
    for choice in step.choices:
        sampled += len(choice.ids)
    fidelity = "error" if step.status == "error" else "flagged" if step.problems else "exact"
    counts = {"steps": 1, fidelity: 1, "sampled_tokens": sampled, "prompt_tokens": sum(map(len, step.prompts))}
    is_reported = CACHED_TOKENS in step.extra or (step.usage is not None and step.usage.get("prompt_tokens_details"))
    if INHERITED in step.extra:  # an engine was not asked: its tokens were counted where they were sampled
        counts = {"steps": 1, fidelity: 1, "inherited": 1, "inherited_tokens": sampled}
    elif is_reported and (cached := step.cached_tokens) is not None:
        counts["cached_tokens"] = cached
    if "mask_mismatch" in step.extra:
        counts["mask_mismatches"] = 1
    if step.status == "error" and isinstance(step.response, dict) and isinstance(step.response.get("status"), int):
        counts[f"{HTTP_COUNT}{step.response['status']}"] = 1
    return StepWrite(
        step.rollout_id,
        incarnation,
        step.step_id,
        record.record,
        record.blocks,
        record.leans_on,
        counts,
        late_if=FINISHED_FIELD,
        origin=origin,
        first=_first_fields(step) if is_first else {},
    )


def _first_fields(step: Step) -> dict[str, bytes]:
    """Return the fields that the first step sets: when its call was received, its policy, and the first words of the task."""
    fields = {BEGAN_FIELD: b"%d" % round(step.timing.received * 1000), POLICY_FIELD: orjson.dumps(step.policy)}
    body = {**step.request, **(step.sent.get("set") or {})}
    texts: list[object] = [body.get("prompt"), body.get("input")]
    if isinstance(messages := body.get("messages"), list):
        users = (message for message in messages if isinstance(message, dict) and message.get("role") == "user")
        content = next(users, {}).get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    text = next((text for text in texts if isinstance(text, str) and text), None)
    if text is not None:
        words = " ".join(text[: 4 * _TASK_CHARACTERS].split())[:_TASK_CHARACTERS]
        fields[TASK_FIELD] = orjson.dumps(words.encode(errors="replace").decode())
    return fields


def _late_if(entry: StepWrite, stored: StoredEntity | None) -> str:
    """Return the field of the rollout that makes an entry of the journal late if it exists.

    A step that was journaled before its rollout was finished is not late, unless the rollout was claimed in a batch since.
    Times are compared by the wall clock; a step of unknown time counts as late.
    """
    if stored is None or FINISHED_FIELD not in stored.fields:
        return CLAIMED_FIELD
    try:
        finished_ms = read_rollout(stored).finished_ms or 0
        taken = decode(entry.record, BlockReader(entry.blocks), whole=False).timing.stored
    except (Damaged, UnreadableRecord):
        return FINISHED_FIELD
    return CLAIMED_FIELD if taken is not None and taken * 1000 < finished_ms else FINISHED_FIELD
