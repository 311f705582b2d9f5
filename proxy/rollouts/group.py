"""A group as the proxy knows it: its terms, its members, its state, and how they lie in the store's fields and marks.

Holds the frozen `Group`, read out of a `StoredEntity`, and the names of what carries it. It neither reads nor writes the
store. A group that calls brought into being has no size, and is never complete by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from proxy.clock import Clock
from proxy.errors import Conflict
from storage.errors import RolloutDeleted
from storage.store import Store
from storage.types import QueuedGroup, StoredEntity

MEMBER_MARK: Final = "member:"
FINISHED_MARK: Final = "finished:"
STATUSES: Final = ("open", "complete", "claimed", "done", "dropped")


@dataclass(frozen=True, slots=True)
class Group:
    """A group as it stands. Times are unix milliseconds.

    `status` is open until `size` members are finished; complete while it waits; claimed while `batch_id` holds it for
    `consumer`, until `lease_ms`; done when that was acknowledged; dropped if it left the queue untrained, and `why`.
    `oldest` is the oldest policy version that sampled a token of it, None if that is not known.
    """

    group_id: str
    incarnation: str
    created_ms: int
    size: int | None = None
    members: tuple[str, ...] = ()
    finished: frozenset[str] = frozenset()
    status: str = "open"
    complete_ms: int | None = None
    oldest: str | None = None
    batch_id: str | None = None
    consumer: str | None = None
    lease_ms: int | None = None
    why: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether all members that it is to have are finished."""
        return self.size is not None and self.finished >= set(self.members) and len(self.members) >= self.size

    def status_at(self, now_ms: int) -> str:
        """The status, in which a lease that ran out counts for nothing."""
        return "complete" if self.status == "claimed" and (self.lease_ms or 0) <= now_ms else self.status


def read_group(stored: StoredEntity, marks: Mapping[str, bytes] | None = None) -> Group:
    """The group that these fields describe, with the members and what is finished by the marks."""
    fields = {name: orjson.loads(value) for name, value in stored.fields.items() if name != "opened_with"}
    made: list[str] = fields.get("members") or []
    joined = _named(marks or {}, MEMBER_MARK) - set(made)
    return Group(
        group_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        size=fields.get("size"),
        members=(*made, *sorted(joined)),
        finished=_named(marks or {}, FINISHED_MARK),
        status=fields.get("status", "open"),
        complete_ms=fields.get("complete_ms"),
        oldest=fields.get("oldest"),
        batch_id=fields.get("batch_id"),
        consumer=fields.get("consumer"),
        lease_ms=fields.get("lease_ms"),
        why=fields.get("why"),
        metadata=fields.get("metadata") or {},
    )


def _named(marks: Mapping[str, bytes], kind: str) -> frozenset[str]:
    """The rollouts that have a mark of this kind."""
    return frozenset(name.removeprefix(kind) for name in marks if name.startswith(kind))


async def join(store: Store, clock: Clock, rollout: StoredEntity, group_id: str) -> None:
    """Make a rollout a member of its group, which comes into being by it.

    Raises Conflict for a group that was opened with all its rollouts, if this is none of them: one that was just made is
    unmade. Raises StorageError.
    """
    while True:
        group = read_group(await store.groups.open(group_id, {}, now_ms=clock.now_ms()))
        if group.size is not None:
            if rollout.name in group.members:
                return
            if rollout.created:
                await store.delete(rollout.name)
            raise Conflict(
                f"the group {group_id!r} was opened with its {group.size} rollouts, and {rollout.name!r} is none of them; "
                "use theirs, or another group",
                param="group_id",
            )
        try:
            marks = {MEMBER_MARK + rollout.name: b""}
            await store.groups.mark(group_id, group.incarnation, marks, now_ms=clock.now_ms())
        except RolloutDeleted:
            continue  # deleted meanwhile: it comes into being again
        return


async def mark_finished(store: Store, clock: Clock, group: Group, *rollout_ids: str) -> None:
    """Note that members are finished; a group that is gone needs no note."""
    try:
        marks = {FINISHED_MARK + rollout_id: b"" for rollout_id in rollout_ids}
        await store.groups.mark(group.group_id, group.incarnation, marks, now_ms=clock.now_ms())
    except RolloutDeleted:
        return


async def find_group(store: Store, group_id: str) -> Group | None:
    """The group of this id with all its members, or None."""
    stored = await store.groups.get(group_id)
    return None if stored is None else read_group(stored, await store.groups.marks(group_id))


Ending = Literal["acked", "released"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch: its groups as they waited. `ended` and `answer` are set once it was settled."""

    batch_id: str
    consumer: str
    held: tuple[QueuedGroup, ...]
    ended: Ending | None = None
    answer: Mapping[str, Any] | None = None


def read_batch(stored: StoredEntity) -> Batch:
    """The batch that these fields describe."""
    fields = {name: orjson.loads(value) for name, value in stored.fields.items()}
    return Batch(
        batch_id=stored.name,
        consumer=fields["consumer"],
        held=tuple(QueuedGroup(group, place, b"") for group, place in fields["held"]),
        ended=fields.get("ended"),
        answer=fields.get("answer"),
    )


def write_batch(consumer: str, held: list[QueuedGroup]) -> dict[str, bytes]:
    """The fields of a new batch."""
    return {
        "consumer": orjson.dumps(consumer),
        "held": orjson.dumps([(waiting.group, waiting.entry_id) for waiting in held]),
    }
