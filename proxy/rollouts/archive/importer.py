"""Brings the rollouts and groups of a dataset back into a store, as they were archived.

Rule 0: before anything is written, every row of every file is checked (see `checks`).
Rule 1: until all its steps are stored, an imported rollout is open and has the field `importing`; its fields are set at the
        end, in one write. So an import that died is completed by the next one, and every import can be repeated.
Rule 2: a rollout that exists otherwise is not changed. Of a rollout with several versions, the newest is imported.
Rule 3: groups come last. Those that were complete or claimed are put into the queue again: leases do not survive. Those that
        were done or dropped do not return to it. This is decided for each policy.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

import orjson
from msgspec import structs

from proxy.rollouts.archive.archiver import Claim
from proxy.rollouts.archive.checks import check_file
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.archive.rows import CLAIM, Row, Saved, name_of, read_saved, record_of
from proxy.rollouts.group import PolicyState, age_fields, read_group, state_fields
from proxy.trajectory.blocks import KnownBlocks
from storage.errors import FieldsChanged
from storage.store import Store
from storage.types import StepWrite, StoredEntity

_IMPORTING: Final = "importing"
_ROWS: Final = 64  # read at once
_QUEUED: Final = ("complete", "claimed")


@dataclass(slots=True)
class Imported:
    """What an import did. `existing`: rollouts that the store has already."""

    rollouts: int = 0
    steps: int = 0
    existing: int = 0
    groups: int = 0


class Importer:
    """Imports one dataset into a store."""

    def __init__(self, store: Store, dataset: Dataset) -> None:
        self._store = store
        self._dataset = dataset

    async def run(self, advance: Callable[[Imported], None] = lambda _: None) -> Imported:
        """Import every rollout that the store does not have.

        Raises:
            ArchiveError, ValueError: The dataset cannot be read, or a value of it is invalid. Nothing was imported.
            StorageError: The store failed.
        """
        result = Imported()
        groups: dict[str, Saved] = {}
        newest = await asyncio.to_thread(self._newest)
        for file in await asyncio.to_thread(self._dataset.names):
            rows = self._dataset.read(file)
            rollout: _Rollout | None = None
            while page := await asyncio.to_thread(lambda rows=rows: list(islice(rows, _ROWS))):  # type: ignore[misc]
                for row in page:
                    if row["rollout"] is not None:
                        await self._end(rollout, result)
                        rollout = await self._begin(row, file, newest, result)
                        _keep_newer(groups, row)
                    if rollout is not None and row["index"] is not None:
                        await self._append(rollout, row)
                        result.steps += 1
                advance(result)
            await self._end(rollout, result)
        for group in groups.values():
            result.groups += await self._import_group(group)
        advance(result)
        return result

    def _newest(self) -> dict[str, int]:
        """Check every row; return the newest version of each rollout. Raises ValueError."""
        newest: dict[str, int] = {}
        for file in self._dataset.names():
            shown = f"{self._dataset.url.rstrip('/')}/{file}".rstrip("/")
            for name, touched_ms in check_file(shown, self._dataset.read(file)).items():
                newest[name] = max(touched_ms, newest.get(name, 0))
        return newest

    async def _begin(self, row: Row, file: str, newest: Mapping[str, int], result: Imported) -> "_Rollout | None":
        """Open a rollout; return None if it is not to be imported."""
        saved = read_saved(row["rollout"])
        if saved.touched_ms != newest.get(saved.name):
            return None
        marker = orjson.dumps({"url": self._dataset.url, "touched_ms": saved.touched_ms})
        stored = await self._store.get(saved.name)
        if stored is None:
            stored = await self._store.open(saved.name, {_IMPORTING: marker}, now_ms=saved.created_ms)
        if stored.fields.get(_IMPORTING) != marker:
            result.existing += 1
            return None
        return _Rollout(saved, stored.incarnation, marker, file, KnownBlocks(), dict(saved.counts))

    async def _append(self, rollout: "_Rollout", row: Row) -> None:
        record = await asyncio.to_thread(record_of, row, rollout.known)
        counts, rollout.counts = rollout.counts, {}  # all with the first record, which is appended once
        entry = StepWrite(
            rollout.saved.name,
            rollout.incarnation,
            name_of(row),
            record.record,
            record.blocks,
            record.leans_on,
            counts,
        )
        await self._store.append(entry, now_ms=rollout.saved.touched_ms)
        rollout.known.update(record.blocks)

    async def _end(self, rollout: "_Rollout | None", result: Imported) -> None:
        """Set the marks and the fields of a rollout whose steps are stored."""
        if rollout is None:
            return
        saved = rollout.saved
        if saved.marks:
            await self._store.mark(saved.name, rollout.incarnation, saved.marks, now_ms=saved.touched_ms)
        claim = Claim(self._dataset.url, rollout.file, saved.touched_ms, done=True, kept=True)
        fields: dict[str, bytes | None] = {**saved.fields, CLAIM: claim.encode(), _IMPORTING: None}
        try:
            await self._store.update_if(
                saved.name, fields, expect={_IMPORTING: rollout.marker}, now_ms=saved.touched_ms
            )
        except FieldsChanged:
            return  # another import has completed it
        result.rollouts += 1

    async def _import_group(self, saved: Saved) -> bool:
        """Create a group with its marks, and enqueue it for policies that wait for it; return whether it was created."""
        groups = self._store.groups
        archived = StoredEntity(saved.name, "", saved.created_ms, saved.touched_ms, saved.fields, saved.counts)
        waiting = {name: state for name, state in read_group(archived).states.items() if state.status in _QUEUED}
        leases = {field for policy, state in waiting.items() for field in state_fields(policy, **structs.asdict(state))}
        stored = await groups.get(saved.name)
        is_new = stored is None
        if stored is None:
            fields = {name: value for name, value in saved.fields.items() if name not in leases}
            stored = await groups.open(saved.name, fields, now_ms=saved.created_ms)
        if stored.created_ms != saved.created_ms:
            return False  # another group of this name
        if saved.marks:
            await groups.mark(saved.name, stored.incarnation, saved.marks, now_ms=saved.touched_ms)
        if waiting:
            await self._enqueue(saved, waiting)
        return is_new

    async def _enqueue(self, saved: Saved, waiting: Mapping[str, PolicyState]) -> None:
        """Put a group into the queues of these policies, unless it has a state for them."""
        notes = {policy: orjson.dumps(age_fields(state.oldest, state.epoch)) for policy, state in waiting.items()}
        fields: dict[str, bytes | None] = {}
        expect: dict[str, bytes | None] = {}
        for policy, state in waiting.items():
            fields |= state_fields(policy, status="complete", **age_fields(state.oldest, state.epoch))
            expect |= state_fields(policy, status=None)
        with suppress(FieldsChanged):
            await self._store.queue.enqueue(saved.name, notes, fields, expect=expect, now_ms=saved.touched_ms)


@dataclass(slots=True)
class _Rollout:
    """A rollout while its steps are imported."""

    saved: Saved
    incarnation: str
    marker: bytes
    file: str
    known: KnownBlocks
    counts: dict[str, int]


def _keep_newer(groups: dict[str, Saved], row: Row) -> None:
    if row["group"] is not None:
        saved = read_saved(row["group"])
        if saved.name not in groups or groups[saved.name].touched_ms < saved.touched_ms:
            groups[saved.name] = saved
