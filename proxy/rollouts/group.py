"""Groups and batches: their values, and how the store's fields and marks represent them.

A group that is created by calls has no size, and never becomes complete.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from proxy.clock import Clock
from proxy.errors import Conflict
from proxy.rollouts.rollout import write_fields
from storage.errors import RolloutDeleted
from storage.store import Store
from storage.types import QueuedGroup, StoredEntity

MEMBER_MARK: Final = "member:"
FINISHED_MARK: Final = "finished:"
REPLACED_MARK: Final = "replaced:"  # its value is the ID of the rollout in place of this member
STATUSES: Final = ("open", "complete", "claimed", "done", "dropped")


@dataclass(frozen=True, slots=True)
class Group:
    """A group. Times are Unix milliseconds.

    `status`: open until `size` members are finished; complete while the group is queued; claimed while `batch_id` leases it to
    `consumer`, until `lease_ms`; done once the batch is acknowledged; dropped if it left the queue untrained, with the reason
    in `why` and its kind in `code`. `oldest` is the oldest policy version that sampled a token of the group, None if unknown.

    `over_sample`: how many more rollouts than `size` it was opened with; it is complete once `size` of them have a reward.
    `replace`: how often each member that fails is opened again; `replaced` has the rollouts in place of those members.
    `unneeded`: why other members than `members` do not count (see `completion.counted`).
    """

    group_id: str
    incarnation: str
    created_ms: int
    size: int | None = None
    over_sample: int = 0
    replace: int = 0
    members: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    unneeded: Mapping[str, str] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    status: str = "open"
    complete_ms: int | None = None
    oldest: str | None = None
    batch_id: str | None = None
    consumer: str | None = None
    lease_ms: int | None = None
    why: str | None = None
    code: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether the group has all its members and all are finished."""
        return self.size is not None and self.finished >= set(self.members) and len(self.members) >= self.size

    @property
    def current(self) -> list[str]:
        """The members that were not replaced, in the group's order; each replacement is in the place of its member."""
        latest = {name: self._latest(name) for name in self.members if name not in self.replaced.values()}
        return list(latest.values())

    def attempts(self, name: str) -> int:
        """Return how often the place of this member was opened before it."""
        before = {new: old for old, new in self.replaced.items()}
        count = 0
        while name in before:
            name, count = before[name], count + 1
        return count

    def _latest(self, name: str) -> str:
        while name in self.replaced:
            name = self.replaced[name]
        return name

    def status_at(self, now_ms: int) -> str:
        """Return the status; a claimed group with an expired lease is complete."""
        return "complete" if self.status == "claimed" and (self.lease_ms or 0) <= now_ms else self.status


def read_group(stored: StoredEntity, marks: Mapping[str, bytes] | None = None) -> Group:
    """Return the group from its stored fields, with joined and finished members from its marks."""
    fields = {name: orjson.loads(value) for name, value in stored.fields.items() if name != "opened_with"}
    initial: list[str] = fields.get("members") or []
    joined = _named(marks or {}, MEMBER_MARK) - set(initial)
    return Group(
        group_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        size=fields.get("size"),
        over_sample=fields.get("over_sample", 0),
        replace=fields.get("replace", 0),
        members=(*initial, *sorted(joined)),
        replaced={
            name.removeprefix(REPLACED_MARK): value.decode()
            for name, value in (marks or {}).items()
            if name.startswith(REPLACED_MARK)
        },
        finished=_named(marks or {}, FINISHED_MARK),
        status=fields.get("status", "open"),
        complete_ms=fields.get("complete_ms"),
        oldest=fields.get("oldest"),
        batch_id=fields.get("batch_id"),
        consumer=fields.get("consumer"),
        lease_ms=fields.get("lease_ms"),
        why=fields.get("why"),
        code=fields.get("code"),
        metadata=fields.get("metadata") or {},
    )


def _named(marks: Mapping[str, bytes], kind: str) -> frozenset[str]:
    """Return the rollouts that have a mark of this kind."""
    return frozenset(name.removeprefix(kind) for name in marks if name.startswith(kind))


async def join(store: Store, clock: Clock, rollout: StoredEntity, group_id: str) -> None:
    """Add a rollout to its group; the group is created if it does not exist.

    Raises:
        Conflict: The group was opened with all its rollouts, and this is not one of them. A rollout that was created by this
            call is deleted.
        StorageError: The store failed.
    """
    while True:
        group = read_group(await store.groups.open(group_id, {}, now_ms=clock.now_ms()))
        if group.size is not None:
            mark = MEMBER_MARK + rollout.name  # of a rollout in place of one that failed
            if rollout.name in group.members or await store.groups.marks(group_id, [mark]):
                return
            if rollout.created:
                await store.delete(rollout.name)
            raise Conflict(
                f"Group {group_id!r} was opened with {group.size} rollouts, and {rollout.name!r} "
                "is not one of them. Use one of them, or another group.",
                param="group_id",
            )
        try:
            marks = {MEMBER_MARK + rollout.name: b""}
            await store.groups.mark(group_id, group.incarnation, marks, now_ms=clock.now_ms())
        except RolloutDeleted:
            continue  # deleted meanwhile: create it again
        return


async def mark_finished(
    store: Store, clock: Clock, group: Group, rollout_ids: Iterable[str], replaced: Mapping[str, str] | None = None
) -> None:
    """Mark members as finished, and add the rollouts in place of those that are replaced, in one write.

    Does nothing if the group was deleted.
    """
    marks = {FINISHED_MARK + rollout_id: b"" for rollout_id in rollout_ids}
    for old, new in (replaced or {}).items():
        marks |= {MEMBER_MARK + new: b"", REPLACED_MARK + old: new.encode()}
    try:
        await store.groups.mark(group.group_id, group.incarnation, marks, now_ms=clock.now_ms())
    except RolloutDeleted:
        return


async def find_group(store: Store, group_id: str) -> Group | None:
    """Return the group with this ID and all its members, or None."""
    stored = await store.groups.get(group_id)
    return None if stored is None else read_group(stored, await store.groups.marks(group_id))


def member_fields(opening: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the fields with which the rollouts of a group are created. `opening`: the body with which it was opened."""
    deadlines = {name: opening[name] for name in ("deadline_s", "idle_s") if name in opening}
    is_over_sampled = True if opening.get("over_sample") else None
    terms = {**opening.get("rollout", {}), **deadlines, "is_over_sampled": is_over_sampled}
    return write_fields({**terms, "group_id": opening["group_id"]})


Ending = Literal["acked", "released"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch with its groups as they were queued. `ended` and `answer` are set once it is acknowledged or released."""

    batch_id: str
    consumer: str
    held: tuple[QueuedGroup, ...]
    ended: Ending | None = None
    answer: Mapping[str, Any] | None = None


def read_batch(stored: StoredEntity) -> Batch:
    """Return the batch from its stored fields."""
    fields = {name: orjson.loads(value) for name, value in stored.fields.items()}
    return Batch(
        batch_id=stored.name,
        consumer=fields["consumer"],
        held=tuple(QueuedGroup(group, entry_id, b"") for group, entry_id in fields["held"]),
        ended=fields.get("ended"),
        answer=fields.get("answer"),
    )


def write_batch(consumer: str, held: list[QueuedGroup]) -> dict[str, bytes]:
    """Return the stored fields of a new batch."""
    return {
        "consumer": orjson.dumps(consumer),
        "held": orjson.dumps([(waiting.group, waiting.entry_id) for waiting in held]),
    }
