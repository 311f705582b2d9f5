"""Checks of an archive before an import writes anything: each value of each row, and that columns agree with each other."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import orjson

from proxy.errors import BadRequest, Damaged
from proxy.rollouts.archive.rows import Row, Saved, facts_of_row, name_of, read_saved, record_of, step_columns
from proxy.rollouts.group import read_group
from proxy.rollouts.rollout import Marks, Rollout, checked_id, read_marks, read_rollout
from proxy.trajectory.blocks import BlockReader, KnownBlocks
from proxy.trajectory.codec import UnreadableRecord, decode
from proxy.trajectory.json_bytes import to_json_bytes
from storage.types import StoredEntity

_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError, msgspec.ValidationError)
_JSON: Final = ("advantages", "metadata")
_TIMES: Final = ("created_at", "finished_at", "received_at")


class InvalidRow(ValueError):
    """A row cannot be imported. The message names the file, the row, the column and the rollout."""


@dataclass(slots=True)
class _Known:
    """The rollout whose rows are read: what it is, and its steps so far."""

    saved: Saved
    rollout: Rollout
    facts: Row
    marks: Marks
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    known: KnownBlocks = field(default_factory=KnownBlocks)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reader = BlockReader(self.blocks)

    reader: BlockReader = field(init=False)


def check_file(file: str, rows: Iterable[Row]) -> dict[str, int]:
    """Return the rollouts of a file with their `touched_ms`. Raises InvalidRow."""
    found: dict[str, int] = {}
    known: _Known | None = None
    number = 0
    for number, row in enumerate(rows):
        known = _checked(file, number, row, known)
        found[known.saved.name] = known.saved.touched_ms
    _check_complete(file, number, known)
    return found


def _checked(file: str, number: int, row: Row, before: _Known | None) -> _Known:
    """Check one row; return its rollout."""
    known = before

    def check(column: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (*_ERRORS, Damaged, BadRequest) as error:
            raise _invalid(file, number, column, row.get("rollout_id"), error) from None

    if row["rollout"] is not None:
        _check_complete(file, number, before)
        known = check("rollout", lambda: _begun(row["rollout"]))
    if known is None:
        raise _invalid(file, number, "rollout", row["rollout_id"], "the first row of a rollout must have it")
    current = known
    for column in known.facts:
        check(column, partial(_check_equal, column, row[column], known.facts[column], "rollout"))
    check("index", lambda: _check_index(row, current))
    if row["index"] is not None:
        check("step_id", lambda: _check_new(row, current))
        column = "record" if row["record_schema"] is None else "head"
        check(column, lambda: _check_step(row, current))
        for column, expected in check("head", lambda: _columns_of_step(row, current)).items():
            if row[column] is not None:
                check(column, partial(_check_equal, column, row[column], expected, "head"))
    if row["group"] is not None:
        check("group", lambda: _check_group(row))
    return known


def _begun(text: str) -> _Known:
    saved = read_saved(text)
    checked_id(saved.name)
    rollout = read_rollout(_stored(saved))
    if not rollout.is_finished:
        raise ValueError(f"its status is {rollout.status!r}, but an archive has finished rollouts only")
    return _Known(saved, rollout, facts_of_row(rollout), read_marks(saved.marks))


def _stored(saved: Saved) -> StoredEntity:
    return StoredEntity(saved.name, "archived", saved.created_ms, saved.touched_ms, saved.fields, saved.counts)


def _columns_of_step(row: Row, known: _Known) -> Row:
    """Return the columns that repeat what the head has; none of a record that was archived as damaged."""
    return {} if row["head"] is None else step_columns(orjson.loads(row["head"]), known.marks)


def _check_equal(column: str, value: Any, expected: Any, source: str) -> None:
    if column in _JSON:
        value, expected = (None if text is None else orjson.loads(text) for text in (value, expected))
    elif column in _TIMES and value is not None:
        value = round(value.timestamp() * 1000)
    if value != expected:
        raise ValueError(f"{value!r:.80} contradicts {expected!r:.80} of the column {source!r}")


def _check_index(row: Row, known: _Known) -> None:
    if row["index"] != (len(known.names) if row["index"] is not None or known.names else None):
        raise ValueError(f"it is {row['index']!r}, but {len(known.names)} rows of the rollout are before this one")


def _check_new(row: Row, known: _Known) -> None:
    name = name_of(row)
    if name in known.names:
        raise ValueError(f"two rows of the rollout have {name!r}")
    known.names.add(name)


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


def _check_group(row: Row) -> None:
    saved = read_saved(row["group"])
    checked_id(saved.name)
    if saved.name != row["group_id"]:
        raise ValueError(f"its name {saved.name!r} contradicts {row['group_id']!r} of the column 'group_id'")
    read_group(_stored(saved), saved.marks)


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
