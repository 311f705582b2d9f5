"""Brings the rollouts and groups of a dataset back into a store, as they were archived.

Rule 0: before anything is written, every row of every file is checked (`check_file`): each value, and that columns agree.
Rule 1: until all its steps are stored, an imported rollout is open and has the field `importing`; its fields are set at the
        end, in one write. So an import that died is completed by the next one, and every import can be repeated.
Rule 2: a rollout that exists otherwise is not changed. Of a rollout with several versions, the newest is imported.
Rule 3: groups come last. Those that were complete or claimed are put into the queue again: leases do not survive. Those that
        were done or dropped do not return to it. This is decided for each policy.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import orjson
from msgspec import structs

from proxy.errors import BadRequest, Damaged
from proxy.rollouts.archive.archiver import Claim
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.archive.rows import CLAIM, Row, Saved, facts_of_row, name_of, read_saved, record_of, step_columns
from proxy.rollouts.group import PolicyState, age_fields, read_group, state_fields
from proxy.rollouts.rollout import Marks, Rollout, checked_id, read_marks, read_rollout
from proxy.trajectory.blocks import BlockReader, KnownBlocks
from proxy.trajectory.codec import UnreadableRecord, decode
from proxy.trajectory.json_bytes import to_json_bytes
from storage.errors import FieldsChanged
from storage.redis.store import Store
from storage.types import StepWrite

_IMPORTING: Final = "importing"
_ROWS: Final = 64  # read at once
_QUEUED: Final = ("complete", "claimed")
_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_JSON: Final = ("advantages", "metadata")
_TIMES: Final = ("created_at", "finished_at", "received_at")


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
        self.store = store
        self.done: list[tuple[str, str]] = []  # the groups of the dataset that were trained, each with the policy
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
        stored = await self.store.get(saved.name)
        if stored is None:
            stored = await self.store.open(saved.name, {_IMPORTING: marker}, now_ms=saved.created_ms)
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
        await self.store.append(entry, now_ms=rollout.saved.touched_ms)
        rollout.known.update(record.blocks)

    async def _end(self, rollout: "_Rollout | None", result: Imported) -> None:
        """Set the marks and the fields of a rollout, after its steps are stored."""
        if rollout is None:
            return
        saved = rollout.saved
        if saved.marks:
            await self.store.mark(saved.name, rollout.incarnation, saved.marks, now_ms=saved.touched_ms)
        claim = Claim(self._dataset.url, rollout.file, saved.touched_ms, done=True, kept=True)
        fields: dict[str, bytes | None] = {**saved.fields, CLAIM: claim.encode(), _IMPORTING: None}
        try:
            await self.store.update_if(saved.name, fields, expect={_IMPORTING: rollout.marker}, now_ms=saved.touched_ms)
        except FieldsChanged:
            return  # another import has completed it
        result.rollouts += 1

    async def _import_group(self, saved: Saved) -> bool:
        """Create a group with its marks, and enqueue it for policies that wait for it; return whether it was created."""
        groups = self.store.groups
        waiting = {name: state for name, state in read_group(saved.entity).states.items() if state.status in _QUEUED}
        leases = {field for policy, state in waiting.items() for field in state_fields(policy, **structs.asdict(state))}
        stored = await groups.get(saved.name)
        is_new = stored is None
        if stored is None:
            fields = {name: value for name, value in saved.fields.items() if name not in leases}
            stored = await groups.open(saved.name, fields, now_ms=saved.created_ms)
        if stored.created_ms != saved.created_ms:
            return False  # another group of this name
        states = read_group(saved.entity).states
        self.done += [(saved.name, policy) for policy, state in states.items() if state.status == "done"]
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
            await self.store.queue.enqueue(saved.name, notes, fields, expect=expect, now_ms=saved.touched_ms)


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


class InvalidRow(ValueError):
    """A row cannot be imported. The message names the file, the row, the column and the rollout."""


@dataclass(slots=True)
class _Known:
    """The rollout that the rows are of: what it is, and its steps so far."""

    saved: Saved
    rollout: Rollout
    facts: Row
    marks: Marks
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    known: KnownBlocks = field(default_factory=KnownBlocks)
    names: set[str] = field(default_factory=set)

    reader: BlockReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = BlockReader(self.blocks)


def check_file(file: str, rows: Iterable[Row]) -> dict[str, int]:
    """Return the rollouts of a file with their `touched_ms`. Raises InvalidRow."""
    found: dict[str, int] = {}
    known: _Known | None = None
    number = 0
    for number, row in enumerate(rows):
        if row["rollout"] is not None:
            _check_complete(file, number, known)
            known = None
        column = "rollout"
        try:
            known = known or _begun(row["rollout"])
            for column in _checks(row, known):  # noqa: B007 - the error names it
                pass
        except (*_ERRORS, Damaged, BadRequest) as error:
            raise _invalid(file, number, column, row.get("rollout_id"), error) from None
        found[known.saved.name] = known.saved.touched_ms
    _check_complete(file, number, known)
    return found


def _begun(text: str | None) -> _Known:
    if text is None:
        raise ValueError("the first row of a rollout must have it")
    saved = read_saved(text)
    checked_id(saved.name)
    rollout = read_rollout(saved.entity)
    if not rollout.is_finished:
        raise ValueError(f"its status is {rollout.status!r}, but an archive has finished rollouts only")
    return _Known(saved, rollout, facts_of_row(rollout), read_marks(saved.marks))


def _checks(row: Row, known: _Known) -> Iterator[str]:
    """Check one row; yield the name of each column before its check. Raises ValueError and others for an invalid value."""
    for column, expected in known.facts.items():
        yield column
        _check_equal(column, row[column], expected, "rollout")
    yield "index"
    is_step, before = row["index"] is not None, len(known.names)
    if row["index"] != (before if is_step or before else None):
        raise ValueError(f"it is {row['index']!r}, but {before} rows of the rollout are before this one")
    if is_step:
        yield "step_id"
        if name_of(row) in known.names:
            raise ValueError(f"two rows of the rollout have {name_of(row)!r}")
        known.names.add(name_of(row))
        yield "record" if row["record_schema"] is None else "head"
        _check_step(row, known)
        yield "head"  # a record that was archived as damaged has none
        columns = {} if row["head"] is None else step_columns(orjson.loads(row["head"]), known.marks)
        for column, expected in columns.items():
            if row[column] is not None:
                yield column
                _check_equal(column, row[column], expected, "head")
    if row["group"] is not None:
        yield "group"
        saved = read_saved(row["group"])
        checked_id(saved.name)
        if saved.name != row["group_id"]:
            raise ValueError(f"its name {saved.name!r} contradicts {row['group_id']!r} of the column 'group_id'")
        read_group(saved.entity, saved.marks)


def _check_equal(column: str, value: Any, expected: Any, source: str) -> None:
    if column in _JSON:
        value, expected = (None if text is None else orjson.loads(text) for text in (value, expected))
    elif column in _TIMES and value is not None:
        value = round(value.timestamp() * 1000)
    if value != expected:
        raise ValueError(f"{value!r:.80} contradicts {expected!r:.80} of the column {source!r}")


def _check_step(row: Row, known: _Known) -> None:
    """Check that the record of a row can be made and read. A record that was archived as damaged returns as it was."""
    record = record_of(row, known.known)
    known.known.update(record.blocks)
    known.blocks.update(record.blocks)
    try:
        step = decode(record.record, known.reader)
    except UnreadableRecord:
        if row["record_schema"] is None and row["step_id"] is None:
            return
        raise
    if row["step_id"] != step.step_id:
        raise ValueError(f"its step_id {step.step_id!r} contradicts {row['step_id']!r} of the column 'step_id'")
    to_json_bytes([step.request, step.sent, step.response])


def _check_complete(file: str, number: int, known: _Known | None) -> None:
    if known is not None and len(known.names) < known.saved.counts.get("steps", 0):
        why = f"the rollout has {known.saved.counts['steps']} steps, but {len(known.names)} rows are in the file"
        raise _invalid(file, number, "index", known.saved.name, why)


def _invalid(file: str, number: int, column: str, rollout: object, why: object) -> InvalidRow:
    shown = why.message if isinstance(why, Damaged | BadRequest) else why
    return InvalidRow(
        f"{file}, row {number}, rollout {rollout!r}, column {column!r}: {shown}. "
        "Nothing was imported. Correct the file, or remove it from the dataset."
    )
