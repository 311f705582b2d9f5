"""Writes a rollout of the store to an archive file, page by page, so that memory does not grow with its length."""

import asyncio
from collections.abc import Sequence
from typing import Final

from proxy.errors import Damaged
from proxy.rollouts.archive.rows import RolloutRows, saved_json
from proxy.rollouts.archive.tables import ArchiveWriter
from proxy.rollouts.group import read_group
from proxy.rollouts.rollout import read_rollout
from storage.store import Store
from storage.types import FullRollout, StoredEntity

_PAGE: Final = 200  # records per read from the store


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
    if full.records:
        await asyncio.to_thread(_write, writer, rows, full.records)
    elif not stored.counts.get("steps"):
        writer.write(rows.empty())
    else:
        await _write_pages(store, writer, rows, name)
    _unchanged(await store.get(name), name, touched_ms)


async def _write_pages(store: Store, writer: ArchiveWriter, rows: RolloutRows, name: str) -> None:
    while records := await store.read(name, rows.count, _PAGE):
        await asyncio.to_thread(_write, writer, rows, records)


def _write(writer: ArchiveWriter, rows: RolloutRows, records: Sequence[bytes]) -> None:
    for record in records:
        writer.write(rows.row(record))


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
