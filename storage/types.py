"""The values that cross the protocols of `store` and `queue`: bytes, names and counts only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LATE_MARK: Final = "late:"  # before the name of a record; append.lua spells the same
MAX_LEASE_MS: Final = 86_400_000  # a day; queue_pending.lua spells the same


@dataclass(frozen=True, slots=True)
class Announcement:
    """What was announced, and its number: of two notices of one name, the later one has the higher."""

    value: bytes
    number: int


class Reservation(NamedTuple):
    """A place for a record to come, held by the record's name for as long as the lease."""

    name: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class StoredEntity:
    """A rollout as the store knows it.

    `incarnation` tells two lives of one name apart (deleted and opened again); `created` is true only in the answer of the
    `open` that made it; `created_ms` and `touched_ms` are unix milliseconds. `announcements` is what was announced, told by
    `open` only. `has_reservation`: whether the place that `open` asked for was given; None if any number of records fits.
    """

    name: str
    incarnation: str
    created_ms: int
    touched_ms: int
    fields: Mapping[str, bytes]
    counts: Mapping[str, int]
    created: bool = False
    announcements: Mapping[str, Announcement] = field(default_factory=dict)
    has_reservation: bool | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """What a rollout that expired is restored with: when it was created, and its fields."""

    created_ms: int
    fields: Mapping[str, bytes] = field(default_factory=dict)


class Appended(NamedTuple):
    """What became of a record: its position, whether it is late, and whether it restored its rollout, which had expired."""

    position: int
    is_late: bool
    is_restored: bool


@dataclass(frozen=True, slots=True)
class StepWrite:
    """One record to append, with all that must be stored together with it.

    `blocks` are new ones (name -> bytes); `required_blocks` names blocks that must be in the store already; `counts` are
    added to the rollout's counts. `late_if` is the name of a field: if the rollout has it when the record is stored, the
    record is late, by a mark `late:` and its name; the count `late` counts those. `origin` restores a rollout that expired.
    """

    rollout: str
    incarnation: str
    name: str
    record: bytes
    blocks: Mapping[bytes, bytes] = field(default_factory=dict)
    required_blocks: Sequence[bytes] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    late_if: str | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class FullRollout:
    """All of a rollout: its records, then read its blocks and marks, then itself."""

    rollout: StoredEntity
    records: list[bytes]
    blocks: dict[bytes, bytes]
    marks: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: rollout names, newest first, and the cursor of the next page (None: this was the last)."""

    names: tuple[str, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """A rollout that changed; with the index and the name of the record, if one was appended."""

    rollout: str
    index: int | None = None
    record: str | None = None


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A group that nobody holds: its place in the queue, which tells its age, and the note it was offered with."""

    group: str
    entry_id: str
    note: bytes


@dataclass(frozen=True, slots=True)
class ServerWarning:
    """Something that speaks against a server, and what to do about it. A fault: rollouts may be lost by it."""

    problem: str
    fix: str
    can_lose_data: bool = True
