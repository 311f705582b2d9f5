"""The values that the protocols in `store`, `queue` and `timers` take and return: names, bytes and counts.

Values that every call creates are structs, which are created several times faster than frozen dataclasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import Struct

LATE_MARK: Final = "late:"  # prefix of a record name; append.lua contains the same literal
MAX_LEASE_MS: Final = 86_400_000  # one day; queue_pending.lua contains the same number
DEFAULT_QUEUE: Final = "default"


@dataclass(frozen=True, slots=True)
class Announcement:
    """An announced value and its number. Of two announcements with the same name, the later one has the higher number."""

    value: bytes
    number: int


class Beat(NamedTuple):
    """The result of a heartbeat.

    `counts`: for each policy all calls in flight, and how many processes know an older pause only. `announcements` are None if
    the process has them already; `known` is the sum of their numbers.
    """

    counts: Mapping[str, tuple[int, int]]
    known: int
    announcements: Mapping[str, Announcement] | None


def newer(announcements: Mapping[str, Announcement], name: str, number: int) -> Announcement | None:
    """Return the announcement of this name if its number is higher; responses of the store may overtake each other."""
    announcement = announcements.get(name)
    return announcement if announcement is not None and announcement.number > number else None


class Reservation(NamedTuple):
    """A reservation for a record that is not stored yet, under the record's name, for the time of the lease."""

    name: str
    lease_ms: int


class Timer(NamedTuple):
    """The timer of one incarnation of a rollout."""

    rollout: str
    incarnation: str


class StoredEntity(Struct, frozen=True):
    """A rollout, group or batch as the store has it.

    `incarnation` changes when an entity is deleted and a new one is opened under the same name. `created` is true only in the
    result of the `open` that created it. `created_ms` and `touched_ms` are Unix milliseconds. Only `open` sets
    `announcements` and `has_reservation`; the latter is None if the entity has no limit on records.
    `damage`: why its times, its counts or its incarnation cannot be read; what can be read is present.
    """

    name: str
    incarnation: str
    created_ms: int
    touched_ms: int
    fields: Mapping[str, bytes]
    counts: Mapping[str, int]
    created: bool = False
    announcements: Mapping[str, Announcement] = {}
    has_reservation: bool | None = None
    damage: str | None = None


class Origin(Struct, frozen=True):
    """The creation time and the fields with which an expired rollout is restored."""

    created_ms: int
    fields: Mapping[str, bytes] = {}


class Appended(NamedTuple):
    """The result of an append: the record's position, whether it is late, whether it restored an expired rollout.

    Not `is_new`: a record with its name was stored before.
    """

    position: int
    is_late: bool
    is_restored: bool
    is_new: bool = True


class StepWrite(Struct, frozen=True):
    """One record to append, with everything that is stored in the same transaction.

    `blocks` are new blocks (name -> bytes); `required_blocks` are the names of blocks that must already be stored; `counts`
    are added to the rollout's counts. `late_if` is the name of a field: if the rollout has that field when the record is
    stored, the record is marked as late (mark `late:NAME`) and the count `late` is incremented. `origin` restores the rollout
    if it has expired. `first` are fields that the rollout gets unless it has them.
    """

    rollout: str
    incarnation: str
    name: str
    record: bytes
    blocks: Mapping[bytes, bytes] = {}
    required_blocks: tuple[bytes, ...] = ()
    counts: Mapping[str, int] = {}
    late_if: str | None = None
    origin: Origin | None = None
    first: Mapping[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class FullRollout:
    """A rollout with all its data, read in this order: records, blocks, marks, the rollout itself.

    So the blocks, marks and counts are never older than the records.
    """

    rollout: StoredEntity
    records: list[bytes]
    blocks: dict[bytes, bytes]
    marks: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of rollout names, newest first, and the cursor of the next page (None on the last page)."""

    names: tuple[str, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a rollout. If a record was appended, `index` and `record` are its position and name."""

    rollout: str
    index: int | None = None
    record: str | None = None


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """An entry of a queue: the name of its group, its ID (ordered by age), the note it was enqueued with, and its queue."""

    group: str
    entry_id: str
    note: bytes
    queue: str = DEFAULT_QUEUE


class QueueCounts(NamedTuple):
    """The number of groups in a queue without and with a holder, and the age of the oldest one without a holder (0: none).

    Groups that were deleted are included until they are claimed. Moves of the last seconds may be missing if a process died.
    """

    available: int
    claimed: int
    oldest_age_ms: int


class QueueState(NamedTuple):
    """Groups of a queue that seem to have no holder, the counts of all groups, the announcements, and overdue holders."""

    groups: list[QueuedGroup]
    counts: QueueCounts
    announcements: Mapping[str, Announcement]
    overdue: list[str]


class ClaimedGroup(NamedTuple):
    """A group that was claimed, with its entry, its fields and its marks in the same transaction."""

    queued: QueuedGroup
    group: StoredEntity
    marks: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ServerWarning:
    """A problem with the configuration or state of a server, and how to fix it."""

    problem: str
    fix: str
    can_lose_data: bool = True
