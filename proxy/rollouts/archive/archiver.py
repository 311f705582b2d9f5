"""The archiver: writes finished rollouts of a store to a dataset, each version once, and deletes them if that is wanted.

Rule 1: a version of a rollout is its `touched_ms`. Before it is written, a compare-and-set on that time stores in the rollout
        the name of its file: the claim. So every version belongs to one file, whichever process writes it.
Rule 2: a file is created once and is complete (`Dataset.publish`). If it exists, its content decides: versions in it are marked
        as done, and claims that it does not contain get another file. If it does not exist, any process may write it.
Rule 3: a rollout is deleted only after it was read in the file, and only if it was not touched since.

So a process can die at any point, and several can archive one store at the same time.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

import orjson

from proxy.clock import Clock, new_id
from proxy.errors import Damaged
from proxy.rollouts.archive.dataset import GROUP_BYTES, ArchiveWriter, Dataset
from proxy.rollouts.archive.rows import CLAIM, RolloutRows, saved_json
from proxy.rollouts.group import Group, find_group, members_of, read_group
from proxy.rollouts.rollout import FINISHED, Rollout, left_out, read_rollout, read_rollouts, value_or
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import LARGE_BYTES, BackgroundWork, off_loop, run_all
from storage.errors import FieldsChanged, StorageError
from storage.redis.store import Store
from storage.types import FullRollout, StoredEntity

When = Literal["acknowledged", "finished"]

_READ_AT_ONCE: Final = 32
_FILE_STEPS: Final = 50_000
_PAGE: Final = 200  # records per read from the store
_OLDEST_PAGE: Final = 1000  # rollouts that leave a full store between two looks at its memory
_BEAT_S: Final = 5.0
_LIFETIME_MS: Final = 20_000
_RETRY_S: Final = 60.0
_ROLE: Final = "archive"
_FINISHED: Final = frozenset(orjson.dumps(status) for status in FINISHED)
_LEFT: Final = ("done", "dropped")  # statuses of groups that no claim returns again


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """What to archive."""

    when: When = "acknowledged"  # rollouts with their group acknowledged or dropped, or all finished ones
    older_than_s: float = 3600  # since they were touched
    delete: bool = False
    rollouts_per_file: int = 1000
    memory_share: float | None = None  # of a server's memory, above which the oldest ones do not wait for their age
    buffer_bytes: int = GROUP_BYTES  # of rows that are compressed together


@dataclass(frozen=True, slots=True)
class Claim:
    """The file to which a version of a rollout belongs."""

    url: str
    file: str
    touched_ms: int
    done: bool = False
    kept: bool = False  # it was imported, and is not deleted

    def encode(self) -> bytes:
        """Return the field of the rollout."""
        return orjson.dumps(self)


@dataclass(slots=True)
class Archived:
    """What a sweep did."""

    rollouts: int = 0
    files: int = 0
    bytes: int = 0
    deleted: int = 0
    oldest_ms: int | None = None  # when the oldest rollout was finished that is not archived yet


@dataclass(slots=True)
class _Found:
    """What a scan has found: claims by file, done or not, and unclaimed rollouts by day."""

    pending: defaultdict[str, dict[str, Claim]] = field(default_factory=lambda: defaultdict(dict))
    done: defaultdict[str, dict[str, Claim]] = field(default_factory=lambda: defaultdict(dict))
    ready: defaultdict[str, list[Rollout]] = field(default_factory=lambda: defaultdict(list))


class Archiver:
    """Archives the rollouts of a store."""

    def __init__(
        self, store: Store, clock: Clock, metrics: Metrics, dataset: Dataset, options: ArchiveOptions | None = None
    ) -> None:
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self._dataset = dataset
        self.options = options or ArchiveOptions()
        self._has_warned = False

    async def sweep(self) -> Archived:
        """Archive every rollout that is due, and complete what processes left that died.

        Raises:
            ArchiveError: The dataset cannot be read or written.
            StorageError: The store failed.
        """
        result, found = Archived(), _Found()
        groups: dict[str, Group | None] = {}
        async for stored in self._finished():
            day = await self._classify(stored, found, groups, result)
            batch = found.ready.get(day, [])
            steps = sum(waiting.counts.get("steps", 0) for waiting in batch)
            if len(batch) >= self.options.rollouts_per_file or steps >= _FILE_STEPS:
                await self._archive_new(found.ready.pop(day), found, result)
        await self._complete_all(found, result)
        return result

    async def is_full(self) -> bool:
        """Return whether a server of the store uses more than `memory_share` of its memory limit. Raises StorageError."""
        share = float((await self.store.info())["memory_share"])
        if not share and not self._has_warned:
            self._has_warned = True
            LOG.warning("archive.memory_share has no effect: no server of the store has a memory limit (maxmemory)")
        return share > (self.options.memory_share or 1)

    async def relieve(self) -> Archived:
        """While the store is full, archive the oldest rollouts whatever their age, and delete them. Raises what `sweep` raises.

        Rollouts of groups that no batch has acknowledged stay, if they have to wait for that.
        """
        eager = Archiver(
            self.store, self.clock, self.metrics, self._dataset, replace(self.options, older_than_s=0, delete=True)
        )
        result, limit = Archived(), min(_OLDEST_PAGE, self.options.rollouts_per_file)
        cursors: list[str | None] = [None]  # of all pages, newest first: the listing has no other order
        while (cursor := (await self.store.list(cursor=cursors[-1], limit=limit)).cursor) is not None:
            cursors.append(cursor)
        for cursor in reversed(cursors):
            if not await self.is_full():
                break
            page = await self.store.list(cursor=cursor, limit=limit)
            await eager._archive_page(page.names, result)
        return result

    async def _archive_page(self, names: Sequence[str], result: Archived) -> None:
        found, groups = _Found(), dict[str, Group | None]()
        for start in range(0, len(names), _READ_AT_ONCE):
            for stored in await self._read(names[start : start + _READ_AT_ONCE]):
                await self._classify(stored, found, groups, result)
        await self._complete_all(found, result)

    async def _classify(
        self, stored: StoredEntity, found: _Found, groups: dict[str, Group | None], result: Archived
    ) -> str:
        """Add a finished rollout to what was found; return its day if it is to be archived, else an empty text."""
        try:
            rollout = read_rollout(stored)
        except Damaged as damage:
            left_out([damage], self.metrics)
            return ""
        name, claim = rollout.rollout_id, _decoded(stored.fields)
        if claim is not None and claim.url == self._dataset.url and claim.touched_ms == rollout.touched_ms:
            if not claim.done:
                found.pending[claim.file][name] = claim
            elif self.options.delete and not claim.kept:
                found.done[claim.file][name] = claim
        elif await self._is_due(rollout, groups):
            found.ready[_day(rollout)].append(rollout)
            return _day(rollout)
        else:
            result.oldest_ms = min(result.oldest_ms or rollout.finished_ms or 0, rollout.finished_ms or 0)
        return ""

    async def _complete_all(self, found: _Found, result: Archived) -> None:
        """Write what was found, and delete what is archived if that is wanted."""
        for name, claims in found.pending.items():
            await self._complete(name, claims, found, result)
        while found.ready:
            await self._archive_new(found.ready.popitem()[1], found, result)
        if self.options.delete:
            for name, claims in found.done.items():
                await self._delete(name, claims, result)

    async def _is_due(self, rollout: Rollout, groups: dict[str, Group | None]) -> bool:
        if rollout.touched_ms > self.clock.now_ms() - 1000 * self.options.older_than_s:
            return False
        if self.options.when == "finished" or rollout.group_id is None:
            return True
        if rollout.group_id not in groups:
            try:
                groups[rollout.group_id] = await find_group(self.store, rollout.group_id)
            except Damaged as damage:
                left_out([damage], self.metrics)
                return False
        group = groups[rollout.group_id]
        return group is None or group.size is None or self._has_left(group)

    async def _archive_new(self, batch: list[Rollout], found: _Found, result: Archived) -> None:
        if not batch:
            return
        file = f"date={_day(batch[0])}/{new_id(self.clock)}.parquet"
        new = [Claim(self._dataset.url, file, rollout.touched_ms) for rollout in batch]
        claimed: dict[str, Claim] = {}
        for start in range(0, len(batch), _READ_AT_ONCE):
            pairs = list(zip(batch, new, strict=True))[start : start + _READ_AT_ONCE]
            was_set = await asyncio.gather(
                *(self._set(rollout.rollout_id, claim, rollout.origin.fields.get(CLAIM)) for rollout, claim in pairs)
            )
            claimed |= {
                rollout.rollout_id: claim for (rollout, claim), is_set in zip(pairs, was_set, strict=True) if is_set
            }
        await self._complete(file, claimed, found, result, is_new=True)

    async def _complete(
        self, file: str, claims: Mapping[str, Claim], found: _Found, result: Archived, *, is_new: bool = False
    ) -> None:
        """Write a file unless it exists, and mark the versions in it as done; claim the others for another file."""
        contained = None if is_new else await asyncio.to_thread(self._dataset.versions, file)
        if contained is None:
            if not await self._write(file, claims, result):
                return
            contained = await asyncio.to_thread(self._dataset.versions, file) or {}

        async def settle(name: str, claim: Claim) -> None:
            if contained.get(name) == claim.touched_ms:
                done = Claim(claim.url, file, claim.touched_ms, done=True)
                if await self._set(name, done, claim.encode()):
                    result.rollouts += 1
                    self.metrics.archived_rollouts.inc()
                    found.done[file][name] = done
            elif (stored := await self.store.get(name)) is not None and stored.touched_ms == claim.touched_ms:
                for rollout in read_rollouts([stored], self.metrics)[0]:
                    found.ready[_day(rollout)].append(rollout)

        await run_all([partial(settle, *item) for item in claims.items()], at_once=_READ_AT_ONCE)

    async def _write(self, file: str, claims: Mapping[str, Claim], result: Archived) -> bool:
        """Write the claimed versions that are still current to a file; return False if there are none."""
        versions = {name: claim.touched_ms for name, claim in claims.items()}
        await asyncio.to_thread(self._dataset.write_card)
        while versions:
            with self._dataset.staged(file) as (target, path):
                try:
                    steps = await self._write_rows(target, versions)
                except RolloutChanged as changed:
                    del versions[changed.name]
                    continue
                size = path.stat().st_size
                if await asyncio.to_thread(self._dataset.publish, path, file):
                    result.files += 1
                    result.bytes += size
                    self.metrics.archived_bytes.inc(size)
                    fields = {"file": file, "rollouts": len(versions), "rows": steps, "bytes": size}
                    LOG.info("Rollouts archived", extra={"fields": fields})
                return True
        return False

    async def _write_rows(self, target: Any, versions: Mapping[str, int]) -> int:
        writer = await asyncio.to_thread(ArchiveWriter, target, self.options.buffer_bytes)
        groups: set[str] = set()
        counted, buffered = 0, self.metrics.archive_buffer_bytes
        try:
            for name, touched_ms in versions.items():
                await write_rollout(self.store, writer, name, touched_ms, groups)
                buffered.inc(writer.size - counted)
                counted = writer.size
            await asyncio.to_thread(writer.close)
            target.flush()
        finally:
            buffered.dec(counted)
            writer.abandon()
        return writer.count

    async def _set(self, name: str, claim: Claim, before: bytes | None) -> bool:
        """Set the claim of a rollout that was not changed; this changes neither its version nor its age."""
        try:
            stored = await self.store.update_if(
                name,
                {CLAIM: claim.encode()},
                expect={CLAIM: before},
                now_ms=claim.touched_ms,
                touched_ms=claim.touched_ms,
            )
        except FieldsChanged as changed:  # also after a lost response to this update
            return changed.rollout.fields.get(CLAIM) == claim.encode()
        return stored is not None

    async def _delete(self, file: str, claims: Mapping[str, Claim], result: Archived) -> None:
        """Delete the versions that a file contains, unless they were changed, or their group is still needed."""
        contained = await asyncio.to_thread(self._dataset.versions, file) or {}

        async def leave(name: str, claim: Claim) -> None:
            try:
                may_leave = contained.get(name) == claim.touched_ms and await self._may_leave(name)
            except Damaged as damage:
                left_out([damage], self.metrics)
                return
            if may_leave and await self.store.delete(name, touched_ms=claim.touched_ms):
                result.deleted += 1

        await run_all([partial(leave, *item) for item in claims.items()], at_once=_READ_AT_ONCE)

    async def _may_leave(self, name: str) -> bool:
        """Return whether a rollout can be deleted; delete its group first, if it has left the queue and all are archived.

        Raises Damaged.
        """
        stored = await self.store.get(name)
        group_id = None if stored is None else read_rollout(stored).group_id
        group = None if group_id is None else await find_group(self.store, group_id)
        if group is None:
            return True
        if group.size is not None and not self._has_left(group):
            return False
        members = await members_of(self.store, group)
        are_archived = all(self._is_done(member) for member in members)
        if are_archived:
            await self.store.groups.delete(group.group_id)
        return are_archived or group.size is None

    def _has_left(self, group: Group) -> bool:
        """Return whether a group was acknowledged or dropped for every policy."""
        return group.status_at(self.clock.now_ms()) in _LEFT

    def _is_done(self, rollout: Rollout) -> bool:
        claim = _decoded(rollout.origin.fields)
        done = (self._dataset.url, rollout.touched_ms, True)
        return claim is not None and (claim.url, claim.touched_ms, claim.done) == done

    async def _finished(self) -> AsyncIterator[StoredEntity]:
        """Yield the finished rollouts, newest first."""
        names: list[str] = []
        async for name in self.store.names():
            names.append(name)
            if len(names) == _READ_AT_ONCE:
                for stored in await self._read(names):
                    yield stored
                names.clear()
        for stored in await self._read(names):
            yield stored

    async def _read(self, names: Iterable[str]) -> list[StoredEntity]:
        found = await asyncio.gather(*map(self.store.get, names))
        return [stored for stored in found if stored is not None and stored.fields.get("status") in _FINISHED]


def _decoded(fields: Mapping[str, bytes]) -> Claim | None:
    """Return the claim of a rollout; a damaged one counts as none, and the rollout is claimed again."""
    found: Claim | None = value_or(None, fields[CLAIM], Claim) if CLAIM in fields else None
    return found


def _day(rollout: Rollout) -> str:
    """Return the day on which a rollout was finished (UTC)."""
    return datetime.fromtimestamp((rollout.finished_ms or 0) / 1000, UTC).date().isoformat()


class RolloutChanged(Exception):
    """A rollout was changed or deleted since its version was claimed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


async def write_rollout(store: Store, writer: ArchiveWriter, name: str, touched_ms: int, groups: set[str]) -> None:
    """Write this version of a rollout. `groups` are those that the file has; the rollout's group is added.

    Raises:
        RolloutChanged: It has another version now; some of its rows may be written.
        StorageError: The store failed.
    """
    full = await store.read_all(name, _PAGE)
    stored = _unchanged(None if full is None else full.rollout, name, touched_ms)
    if full is None or len(full.records) >= _PAGE:
        full = FullRollout(stored, [], await store.blocks(name), await store.marks(name))
    try:
        rollout = read_rollout(stored)
    except Damaged:
        raise RolloutChanged(name) from None
    rows = RolloutRows(stored, full.marks, full.blocks, await _group(store, rollout.group_id, groups))

    def write(records: Sequence[bytes]) -> None:
        for record in records:
            writer.write(rows.row(record))

    if full.records:
        await off_loop(sum(map(len, full.records)), LARGE_BYTES // 16, write, full.records)
    elif not stored.counts.get("steps"):
        writer.write(rows.empty())
    else:  # page by page, so that memory does not grow with its length
        while records := await store.read(name, rows.count, _PAGE):
            await asyncio.to_thread(write, records)
    _unchanged(await store.get(name), name, touched_ms)


def _unchanged(stored: StoredEntity | None, name: str, touched_ms: int) -> StoredEntity:
    if stored is None or stored.touched_ms != touched_ms:
        raise RolloutChanged(name)
    return stored


async def _group(store: Store, group_id: str | None, groups: set[str]) -> bytes | None:
    """Return the JSON of the rollout's group, unless the file has it, or the group is gone or unreadable."""
    if group_id is None or group_id in groups:
        return None
    groups.add(group_id)
    group = await store.groups.get(group_id)
    if group is None:
        return None
    marks = await store.groups.marks(group_id)
    try:
        read_group(group, marks)
    except Damaged:
        return None
    return saved_json(group, marks)


class BackgroundArchive(BackgroundWork):
    """Sweep at an interval while this process leads: the first one of those with the store, until it ends.

    Two may sweep at the same time when the leader stalls: the claims keep every version in one file. Call `close` before
    the store is closed.
    """

    def __init__(self, archiver: Archiver, *, process_id: str, interval_s: float) -> None:
        self._archiver = archiver
        self._announcements = archiver.store.announcements
        self._process_id = process_id
        self._interval_s = interval_s
        self._oldest_ms: int | None = None
        archiver.metrics.archive_oldest_age_seconds.set_function(
            lambda: 0.0 if self._oldest_ms is None else max(0.0, (archiver.clock.now_ms() - self._oldest_ms) / 1000)
        )

    async def close(self) -> None:
        """Stop; another process completes what this one has claimed."""
        await super().close()
        with suppress(StorageError, TimeoutError):  # else it expires
            async with asyncio.timeout(1):
                await self._announcements.lead(_ROLE, self._process_id, lifetime_ms=0)

    async def leads(self) -> bool:
        """Return whether this process leads, from now on. Raises StorageError."""
        return await self._announcements.lead(_ROLE, self._process_id, lifetime_ms=_LIFETIME_MS)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_forever())
            tasks.create_task(self._sweep_forever())
            if self._archiver.options.memory_share is not None:
                tasks.create_task(self._relieve_forever())

    async def _beat_forever(self) -> None:
        while True:
            with suppress(StorageError):  # calls notice it and report it
                await self.leads()
            await asyncio.sleep(_BEAT_S)

    async def _sweep_forever(self) -> None:
        while True:
            wait_s = self._interval_s
            try:
                if await self.leads():
                    self._oldest_ms = (await self._archiver.sweep()).oldest_ms
                else:
                    self._oldest_ms = None
            except (StorageError, OSError, ValueError) as error:
                self._archiver.metrics.archive_failures.inc()
                LOG.error("Rollouts not archived: %s", error)
                wait_s = min(wait_s, _RETRY_S)
            await asyncio.sleep(wait_s)

    async def _relieve_forever(self) -> None:
        """Look at the memory of the store every few seconds; rarely while nothing can leave it."""
        while True:
            wait_s = _BEAT_S
            try:
                if await self._archiver.is_full() and await self.leads():
                    relieved = await self._archiver.relieve()
                    wait_s = _BEAT_S if relieved.deleted else _RETRY_S
                    fields = {"deleted": relieved.deleted, "archived": relieved.rollouts}
                    LOG.warning(
                        "Rollouts archived because the store is full (archive.memory_share)", extra={"fields": fields}
                    )
            except (StorageError, OSError, ValueError) as error:
                self._archiver.metrics.archive_failures.inc()
                LOG.error("Rollouts of a full store not archived: %s", error)
                wait_s = _RETRY_S
            await asyncio.sleep(wait_s)
