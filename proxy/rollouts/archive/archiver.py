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
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
import orjson

from proxy.clock import Clock, new_id
from proxy.errors import Damaged
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.archive.rows import CLAIM
from proxy.rollouts.archive.tables import ArchiveWriter
from proxy.rollouts.archive.writing import RolloutChanged, write_rollout
from proxy.rollouts.group import Group, find_group, members_of
from proxy.rollouts.rollout import FINISHED, Rollout, read_rollout, read_rollouts
from proxy.rollouts.stored_fields import left_out, parsed
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import FieldsChanged
from storage.store import Store
from storage.types import StoredEntity

When = Literal["acknowledged", "finished"]

_READ_AT_ONCE: Final = 32
_FILE_STEPS: Final = 50_000
_LEFT: Final = ("done", "dropped")  # statuses of groups that no claim returns again


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """What to archive: rollouts finished, or with their group acknowledged or dropped, that were not touched for some time."""

    when: When = "acknowledged"
    older_than_s: float = 3600
    delete: bool = False
    rollouts_per_file: int = 1000


@dataclass(frozen=True, slots=True)
class Claim:
    """The file to which a version of a rollout belongs. `kept`: it was imported, and is not deleted."""

    url: str
    file: str
    touched_ms: int
    done: bool = False
    kept: bool = False

    def encode(self) -> bytes:
        """Return the field of the rollout."""
        return orjson.dumps(self)


@dataclass(slots=True)
class Archived:
    """What a sweep did. `oldest_ms`: when the oldest rollout was finished that is not archived yet."""

    rollouts: int = 0
    files: int = 0
    bytes: int = 0
    deleted: int = 0
    oldest_ms: int | None = None


@dataclass(slots=True)
class _Found:
    """What a scan has found, by file: claims that are not done, and done ones; and unclaimed rollouts by day."""

    pending: defaultdict[str, dict[str, Claim]] = field(default_factory=lambda: defaultdict(dict))
    done: defaultdict[str, dict[str, Claim]] = field(default_factory=lambda: defaultdict(dict))
    ready: defaultdict[str, list[Rollout]] = field(default_factory=lambda: defaultdict(list))


class Archiver:
    """Archives the rollouts of a store."""

    def __init__(
        self, store: Store, clock: Clock, metrics: Metrics, dataset: Dataset, options: ArchiveOptions | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._dataset = dataset
        self._options = options or ArchiveOptions()

    async def sweep(self) -> Archived:
        """Archive every rollout that is due, and complete what processes left that died.

        Raises:
            ArchiveError: The dataset cannot be read or written.
            StorageError: The store failed.
        """
        result, found = Archived(), _Found()
        groups: dict[str, Group | None] = {}
        async for stored in self._finished():
            try:
                rollout = read_rollout(stored)
            except Damaged as damage:
                left_out([damage], self._metrics)
                continue
            await self._classify(rollout, _claim_of(stored), found, groups, result)
            batch = found.ready[_day(rollout)]
            if len(batch) >= self._options.rollouts_per_file or sum(map(_steps, batch)) >= _FILE_STEPS:
                del found.ready[_day(rollout)]
                await self._archive_new(batch, found, result)
        for name, claims in found.pending.items():
            await self._complete(name, claims, found, result)
        while found.ready:
            await self._archive_new(found.ready.popitem()[1], found, result)
        if self._options.delete:
            for name, claims in found.done.items():
                await self._delete(name, claims, result)
        return result

    async def _classify(
        self, rollout: Rollout, claim: Claim | None, found: _Found, groups: dict[str, Group | None], result: Archived
    ) -> None:
        name = rollout.rollout_id
        if claim is not None and claim.url == self._dataset.url and claim.touched_ms == rollout.touched_ms:
            if not claim.done:
                found.pending[claim.file][name] = claim
            elif self._options.delete and not claim.kept:
                found.done[claim.file][name] = claim
        elif await self._is_due(rollout, groups):
            found.ready[_day(rollout)].append(rollout)
        else:
            result.oldest_ms = min(result.oldest_ms or rollout.finished_ms or 0, rollout.finished_ms or 0)

    async def _is_due(self, rollout: Rollout, groups: dict[str, Group | None]) -> bool:
        if rollout.touched_ms > self._clock.now_ms() - 1000 * self._options.older_than_s:
            return False
        if self._options.when == "finished" or rollout.group_id is None:
            return True
        if rollout.group_id not in groups:
            try:
                groups[rollout.group_id] = await find_group(self._store, rollout.group_id)
            except Damaged as damage:
                left_out([damage], self._metrics)
                return False
        group = groups[rollout.group_id]
        return group is None or group.size is None or self._has_left(group)

    async def _archive_new(self, batch: list[Rollout], found: _Found, result: Archived) -> None:
        """Claim rollouts for a new file, and write it."""
        if not batch:
            return
        file = f"date={_day(batch[0])}/{new_id(self._clock)}.parquet"
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
        for name, claim in claims.items():
            if contained.get(name) == claim.touched_ms:
                done = Claim(claim.url, file, claim.touched_ms, done=True)
                if await self._set(name, done, claim.encode()):
                    result.rollouts += 1
                    self._metrics.archived_rollouts.inc()
                    found.done[file][name] = done
            elif (stored := await self._store.get(name)) is not None and stored.touched_ms == claim.touched_ms:
                for rollout in read_rollouts([stored], self._metrics)[0]:
                    found.ready[_day(rollout)].append(rollout)

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
                    self._metrics.archived_bytes.inc(size)
                    fields = {"file": file, "rollouts": len(versions), "rows": steps, "bytes": size}
                    LOG.info("Rollouts archived", extra={"fields": fields})
                return True
        return False

    async def _write_rows(self, target: Any, versions: Mapping[str, int]) -> int:
        writer = await asyncio.to_thread(ArchiveWriter, target)
        groups: set[str] = set()
        try:
            for name, touched_ms in versions.items():
                await write_rollout(self._store, writer, name, touched_ms, groups)
            await asyncio.to_thread(writer.close)
            target.flush()
        finally:
            writer.abandon()
        return writer.count

    async def _set(self, name: str, claim: Claim, before: bytes | None) -> bool:
        """Set the claim of a rollout that was not changed; this changes neither its version nor its age."""
        try:
            stored = await self._store.update_if(
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
        for name, claim in claims.items():
            try:
                may_leave = contained.get(name) == claim.touched_ms and await self._may_leave(name)
            except Damaged as damage:
                left_out([damage], self._metrics)
                continue
            if may_leave:
                result.deleted += await self._store.delete(name, touched_ms=claim.touched_ms)

    async def _may_leave(self, name: str) -> bool:
        """Return whether a rollout can be deleted; delete its group first, if it has left the queue and all are archived.

        Raises Damaged.
        """
        stored = await self._store.get(name)
        group_id = None if stored is None else read_rollout(stored).group_id
        group = None if group_id is None else await find_group(self._store, group_id)
        if group is None:
            return True
        if group.size is not None and not self._has_left(group):
            return False
        members = await members_of(self._store, group)
        are_archived = all(self._is_done(member) for member in members)
        if are_archived:
            await self._store.groups.delete(group.group_id)
        return are_archived or group.size is None

    def _has_left(self, group: Group) -> bool:
        """Return whether a group was acknowledged or dropped for every policy."""
        return group.status_at(self._clock.now_ms()) in _LEFT

    def _is_done(self, rollout: Rollout) -> bool:
        claim = _decoded(rollout.origin.fields)
        return (
            claim is not None
            and claim.done
            and (claim.url, claim.touched_ms) == (self._dataset.url, rollout.touched_ms)
        )

    async def _finished(self) -> AsyncIterator[StoredEntity]:
        """Yield the finished rollouts, newest first."""
        names: list[str] = []
        async for name in self._store.names():
            names.append(name)
            if len(names) == _READ_AT_ONCE:
                for stored in await self._read(names):
                    yield stored
                names.clear()
        for stored in await self._read(names):
            yield stored

    async def _read(self, names: Iterable[str]) -> list[StoredEntity]:
        found = await asyncio.gather(*map(self._store.get, names))
        return [stored for stored in found if stored is not None and stored.fields.get("status") in _FINISHED]


_FINISHED: Final = frozenset(orjson.dumps(status) for status in FINISHED)


def _claim_of(stored: StoredEntity) -> Claim | None:
    return _decoded(stored.fields)


def _decoded(fields: Mapping[str, bytes]) -> Claim | None:
    """Return the claim of a rollout; a damaged one counts as none, and the rollout is claimed again."""
    try:
        return msgspec.convert(parsed(fields[CLAIM]), Claim) if CLAIM in fields else None
    except (ValueError, TypeError, msgspec.ValidationError):
        return None


def _day(rollout: Rollout) -> str:
    """Return the day on which a rollout was finished (UTC)."""
    return datetime.fromtimestamp((rollout.finished_ms or 0) / 1000, UTC).date().isoformat()


def _steps(rollout: Rollout) -> int:
    return rollout.counts.get("steps", 0)
