"""A group as the proxy knows it: its terms, its members, its state, and how they lie in the store's fields and marks.

Holds the frozen `Group`, read out of a `StoredEntity`, and the names of what carries it. It neither reads nor writes the
store. A group that calls brought into being has no size, and is never complete by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from storage.types import StoredEntity

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
