"""Groups and batches: their values, and how the store's fields and marks represent them.

A group that is created by calls has no size, and never becomes complete.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

import orjson

from proxy.clock import Clock
from proxy.errors import Conflict
from proxy.rollouts.rollout import write_fields
from proxy.trajectory.step import DEFAULT_POLICY
from storage.errors import RolloutDeleted
from storage.store import Store
from storage.types import QueuedGroup, StoredEntity

MEMBER_MARK: Final = "member:"
FINISHED_MARK: Final = "finished:"
REPLACED_MARK: Final = "replaced:"  # its value is the ID of the rollout in place of this member
_OPEN: Final = "open"
STATUSES: Final = (_OPEN, "complete", "claimed", "done", "dropped")


@dataclass(frozen=True, slots=True)
class PolicyState:
    """A complete group as one policy's consumers have it. Times are Unix milliseconds.

    `status`: complete while the group is queued; claimed while `batch_id` leases it to `consumer`, until `lease_ms`; done once
    the batch is acknowledged; dropped if it left the queue untrained, with the reason in `why` and its kind in `code`.
    `epoch` is the earliest epoch of the policy in which a token of the group was sampled, and `oldest` the oldest version among
    those tokens, None if unknown. `delivery`: how many batches had the group; `delivered_to`: the consumer of the last of them,
    also once it was released. `requeued` is how often it was put into the queue again, the last time at `requeued_ms` with
    `max_staleness`, and `acked` how often it was acknowledged before that.
    """

    status: str
    oldest: str | None = None
    epoch: int = 0
    batch_id: str | None = None
    consumer: str | None = None
    lease_ms: int | None = None
    why: str | None = None
    code: str | None = None
    delivery: int = 0
    delivered_to: str | None = None
    requeued: int = 0
    acked: int = 0
    requeued_ms: int | None = None
    max_staleness: int | None = None

    def status_at(self, now_ms: int) -> str:
        """Return the status; a claimed group with an expired lease is complete."""
        return "complete" if self.status == "claimed" and (self.lease_ms or 0) <= now_ms else self.status


_STATE_FIELDS: Final = tuple(entry.name for entry in fields(PolicyState))


@dataclass(frozen=True, slots=True)
class Group:
    """A group. Times are Unix milliseconds.

    `states`: the state of the group for each policy that has it in its queue or had it, once it is complete.

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
    complete_ms: int | None = None
    states: Mapping[str, PolicyState] = field(default_factory=dict)
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

    def queued_ms(self, policy: str) -> int:
        """Return when the group was put into the queue of a policy."""
        state = self.states.get(policy)
        return max(self.complete_ms or 0, (state and state.requeued_ms) or 0)

    def requeues(self, policy: str) -> dict[str, int]:
        """Return how often the group was requeued for a policy, and acknowledged before; empty if it was not requeued."""
        state = self.states.get(policy)
        return {"requeued": state.requeued, "acked": state.acked} if state and state.requeued else {}

    def _latest(self, name: str) -> str:
        while name in self.replaced:
            name = self.replaced[name]
        return name

    @property
    def is_open(self) -> bool:
        """Whether not all of its members are finished."""
        return not self.states

    def status_at(self, now_ms: int) -> str:
        """Return the first of `STATUSES` that the group has for a policy."""
        return min((state.status_at(now_ms) for state in self.states.values()), key=STATUSES.index, default=_OPEN)

    def status_for(self, policy: str, now_ms: int) -> str | None:
        """Return the status for a policy; None if the group is complete and not for this policy."""
        if self.is_open:
            return _OPEN
        return self.states[policy].status_at(now_ms) if policy in self.states else None


def read_group(stored: StoredEntity, marks: Mapping[str, bytes] | None = None) -> Group:
    """Return the group from its stored fields, with joined and finished members from its marks."""
    known = {name: orjson.loads(value) for name, value in stored.fields.items() if name != "opened_with"}
    initial: list[str] = known.get("members") or []
    joined = _named(marks or {}, MEMBER_MARK) - set(initial)
    return Group(
        group_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        size=known.get("size"),
        over_sample=known.get("over_sample", 0),
        replace=known.get("replace", 0),
        members=(*initial, *sorted(joined)),
        replaced={
            name.removeprefix(REPLACED_MARK): value.decode()
            for name, value in (marks or {}).items()
            if name.startswith(REPLACED_MARK)
        },
        finished=_named(marks or {}, FINISHED_MARK),
        complete_ms=known.get("complete_ms"),
        states=_read_states(known),
        metadata=known.get("metadata") or {},
    )


def _read_states(known: Mapping[str, Any]) -> dict[str, PolicyState]:
    """Return the state for each policy; its fields have the name of the policy as a suffix, except those of the default one."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in known.items():
        kind, _, policy = name.partition(":")
        if kind in _STATE_FIELDS:
            found.setdefault(policy or DEFAULT_POLICY, {})[kind] = value
    return {policy: PolicyState(**values) for policy, values in sorted(found.items()) if "status" in values}


def state_fields(policy: str, **values: Any) -> dict[str, bytes | None]:
    """Return the stored fields of a group's state for a policy; None removes a field."""
    suffix = "" if policy == DEFAULT_POLICY else f":{policy}"
    return {f"{name}{suffix}": None if value is None else orjson.dumps(value) for name, value in values.items()}


def age_fields(oldest: str | None, epoch: int) -> dict[str, Any]:
    """Return the oldest version of a group as its state and its entry in the queue have it: the first epoch is not written."""
    return {"oldest": oldest, "epoch": epoch} if epoch else {"oldest": oldest}


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


def member_fields(opening: Mapping[str, Any], deadlines: Mapping[str, float]) -> dict[str, bytes]:
    """Return the fields with which rollouts of a group are created. `opening`: the body with which it was opened."""
    is_over_sampled = True if opening.get("over_sample") else None
    terms = {**opening.get("rollout", {}), **deadlines, "is_over_sampled": is_over_sampled}
    return write_fields({**terms, "group_id": opening["group_id"]})


Ending = Literal["acked", "released", "taken_over"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of groups for a policy, as they were queued. `ended` and `answer` are set once it is acknowledged or released.

    `instance` is the process of the consumer that claimed it, and `heartbeat_ms` how often that one extends its lease. The
    batch is `taken_over` once it missed that and another instance of the consumer released its groups.
    """

    batch_id: str
    consumer: str
    policy: str
    held: tuple[QueuedGroup, ...]
    instance: str | None = None
    heartbeat_ms: int | None = None
    ended: Ending | None = None
    answer: Mapping[str, Any] | None = None


def read_batch(stored: StoredEntity) -> Batch:
    """Return the batch from its stored fields."""
    known = {name: orjson.loads(value) for name, value in stored.fields.items()}
    policy = known.get("policy", DEFAULT_POLICY)
    return Batch(
        batch_id=stored.name,
        consumer=known["consumer"],
        policy=policy,
        held=tuple(QueuedGroup(group, entry_id, b"", policy) for group, entry_id in known["held"]),
        instance=known.get("instance"),
        heartbeat_ms=known.get("heartbeat_ms"),
        ended=known.get("ended"),
        answer=known.get("answer"),
    )


def write_batch(
    consumer: str, policy: str, held: list[QueuedGroup], *, instance: str | None = None, heartbeat_ms: int | None = None
) -> dict[str, bytes]:
    """Return the stored fields of a new batch."""
    entries = [(waiting.group, waiting.entry_id) for waiting in held]
    named = None if policy == DEFAULT_POLICY else policy
    beats = {"instance": instance, "heartbeat_ms": heartbeat_ms}
    return write_fields({"consumer": consumer, "held": entries, "policy": named, **beats})
