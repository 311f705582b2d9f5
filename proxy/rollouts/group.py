"""Groups and batches: their values, how the store's fields and marks represent them, and the members of groups.

A group that is created by calls has no size, and never becomes complete.

The rewards of a member are frozen while a claim of its group relies on them: its field `claimed_by` lists these claims. The
field exists as long as there is one, and changes of rewards expect that it is absent. A claim adds itself before it reads the
rewards, and removes only itself if it is undone, so that claims of several policies, and claims with an expired lease, do not
undo each other's freeze.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict

import msgspec
import orjson
from msgspec import Struct, field, structs

from proxy.clock import Clock
from proxy.errors import Conflict
from proxy.rollouts.rollout import (
    SURPLUS,
    ClaimId,
    Count,
    Milliseconds,
    Rollout,
    damage_of,
    marked,
    of_policy,
    parsed,
    read_claims,
    read_each,
    read_fields,
    read_rollout,
    read_rollouts,
    split_policy,
    value_or,
    write_claims,
    write_fields,
)
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import DEFAULT_POLICY
from storage.errors import FieldsChanged, RolloutDeleted
from storage.redis.store import Store
from storage.types import QueuedGroup, StoredEntity

MEMBER_MARK: Final = "member:"
FINISHED_MARK: Final = "finished:"
REPLACED_MARK: Final = "replaced:"  # its value is the ID of the rollout in place of this member
_OPEN: Final = "open"
_READ_AT_ONCE: Final = 256  # rollouts
_SCORED: Final = ("completed", "truncated")  # rollouts that get a reward
_SURPLUS: Final = "its over-sampled group does not need it"

Claims: TypeAlias = tuple[ClaimId, ...]
STATUSES: Final = (_OPEN, "complete", "claimed", "done", "dropped")


class PolicyState(Struct, frozen=True):
    """A complete group as one policy's consumers have it. Times are Unix milliseconds."""

    # Queued, leased by a batch, acknowledged, or left untrained.
    status: Literal["complete", "claimed", "done", "dropped"]
    oldest: str | None = None  # the oldest version in `epoch` that sampled a token of the group; None if unknown
    epoch: int = 0  # the earliest one of the policy in which a token of the group was sampled
    batch_id: str | None = None  # which leases it to `consumer` until `lease_ms`
    consumer: str | None = None
    lease_ms: int | None = None
    why: str | None = None  # it was dropped, and `code`, the kind of the reason
    code: str | None = None
    delivery: int = 0  # how many batches had the group
    delivered_to: str | None = None  # the consumer of the last of them, also once it was released
    requeued: int = 0  # how often it was put into the queue again, the last time at `requeued_ms` with `max_staleness`
    acked: int = 0  # how often it was acknowledged before that
    requeued_ms: int | None = None
    max_staleness: int | None = None

    def status_at(self, now_ms: int) -> str:
        """Return the status; a claimed group with an expired lease is complete."""
        return "complete" if self.status == "claimed" and (self.lease_ms or 0) <= now_ms else self.status


class _Replay(TypedDict):
    ignore: list[str]
    presets: list[str]


class Group(Struct, frozen=True):
    """A group. Times are Unix milliseconds. Names and types of stored fields bind data, as in `Rollout`."""

    group_id: str
    incarnation: str
    created_ms: int
    size: Count | None = None
    # How many more rollouts it was opened with; it is complete once `size` of them have a reward.
    over_sample: Count = 0
    replace: Count = 0  # how often each member that fails is opened again
    replay: _Replay | None = None  # the new one plays back the one that failed, with this in its terms
    members: tuple[str, ...] = ()
    complete_ms: Milliseconds | None = None
    metadata: Mapping[str, Any] = {}
    finished: frozenset[str] = frozenset()
    replaced: Mapping[str, str] = {}  # the rollouts in place of members that failed
    unneeded: Mapping[str, str] = {}  # why other members than `members` do not count (see `counted`)
    states: Mapping[str, PolicyState] = {}  # once it is complete, for each policy that has it in its queue or had it

    @property
    def is_full(self) -> bool:
        """Whether the group has all its members and all are finished."""
        return self.size is not None and self.finished >= set(self.members) and len(self.members) >= self.size

    @property
    def current(self) -> list[str]:
        """The members that were not replaced, in the group's order; each replacement is in the place of its member."""
        latest = {name: self._latest(name) for name in self.members if name not in self.replaced.values()}
        return list(latest.values())

    @property
    def earlier(self) -> dict[str, frozenset[str]]:
        """For each member that is in place of others, these others."""
        found: dict[str, frozenset[str]] = {}
        for first in self.replaced.keys() - self.replaced.values():
            name, before = first, frozenset[str]()
            while name in self.replaced:
                before |= {name}
                name = self.replaced[name]
                found[name] = before
        return found

    def attempts(self, name: str) -> int:
        """Return how often the place of this member was opened before it."""
        return len(self.earlier.get(name, ()))

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
    """Return the group from its stored fields, with joined and finished members from its marks. Raises Damaged."""
    marks = marks or {}
    with damage_of("group", stored.name):
        states, replaced = _read_states(stored.fields), _read_replaced(marks)
    group = read_fields(
        stored,
        Group,
        "group",
        group_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        finished=marked(marks, FINISHED_MARK),
        replaced=replaced,
        unneeded={},
        states=states,
    )
    joined = marked(marks, MEMBER_MARK).difference(group.members)
    return structs.replace(group, members=(*group.members, *sorted(joined))) if joined else group


def _read_states(stored: Mapping[str, bytes]) -> dict[str, PolicyState]:
    """Return the state for each policy. Names of stored fields end in the name of the policy, except for the default policy."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in stored.items():
        kind, policy = split_policy(name)
        if kind in PolicyState.__struct_fields__:
            found.setdefault(policy, {})[kind] = parsed(value)
    return {
        policy: msgspec.convert(values, PolicyState) for policy, values in sorted(found.items()) if "status" in values
    }


def _read_replaced(marks: Mapping[str, bytes]) -> dict[str, str]:
    """Return the rollouts in place of members. Raises ValueError if a member replaces itself, also through others."""
    replaced = {
        name.removeprefix(REPLACED_MARK): value.decode()
        for name, value in marks.items()
        if name.startswith(REPLACED_MARK)
    }
    ended: set[str] = set()
    for first in replaced:
        name, path = first, set[str]()
        while name in replaced and name not in ended:
            if name in path:
                raise ValueError(f"rollout {name!r} is in place of itself")
            path.add(name)
            name = replaced[name]
        ended |= path
    return replaced


class Note(Struct, frozen=True):
    """What the entry of a group in a queue has for claims."""

    oldest: str | None = None  # as `PolicyState`, also `epoch`
    epoch: Count = 0
    empty: bool = False  # it has no tokens
    max_staleness: Count | None = None  # of a requeue, instead of the claim's
    rewarded: bool = False  # each member that gets a reward had one when the group was queued


def read_note(note: bytes) -> Note:
    """Return the note of a group in a queue; a damaged note has no oldest version, which counts as older than any."""
    found: Note = value_or(Note(), note, Note)
    return found


def state_fields(policy: str, **values: Any) -> dict[str, bytes | None]:
    """Return the stored fields of a group's state for a policy; None removes a field."""
    return {of_policy(name, policy): None if value is None else orjson.dumps(value) for name, value in values.items()}


def age_fields(oldest: str | None, epoch: int) -> dict[str, Any]:
    """Return the oldest version of a group as its state and its entry in the queue have it: the first epoch is not written."""
    return {"oldest": oldest, "epoch": epoch} if epoch else {"oldest": oldest}


async def join(store: Store, clock: Clock, rollout: StoredEntity, group_id: str) -> None:
    """Add a rollout to its group; the group is created if it does not exist.

    Raises Conflict if the group was opened with all its rollouts, and this is not one of them; then a rollout that was created
    by this call is deleted.
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
    """Mark members as finished, and add the rollouts in place of those that are replaced, in one write."""
    marks = {FINISHED_MARK + rollout_id: b"" for rollout_id in rollout_ids}
    for old, new in (replaced or {}).items():
        marks |= {MEMBER_MARK + new: b"", REPLACED_MARK + old: new.encode()}
    with suppress(RolloutDeleted):
        await store.groups.mark(group.group_id, group.incarnation, marks, now_ms=clock.now_ms())


async def find_group(store: Store, group_id: str) -> Group | None:
    """Return the group with this ID and all its members, or None. Raises Damaged."""
    stored, marks = await store.groups.get_marked(group_id)
    return None if stored is None else read_group(stored, marks)


class _Opening(Struct):
    group_id: str
    rollout: dict[str, Any] = {}


def opening_of(stored: StoredEntity) -> dict[str, Any]:
    """Return the body with which a group was opened. Raises Damaged."""
    with damage_of("group", stored.name):
        opening: dict[str, Any] = parsed(stored.fields.get("opened_with", b"null"))
        msgspec.convert(opening, _Opening)
    return opening


def member_names(stored: StoredEntity, marks: Mapping[str, bytes]) -> set[str]:
    """Return the members of a group for its deletion: those that can be read."""
    return {*value_or([], stored.fields.get("members", b"[]"), list[str]), *marked(marks, MEMBER_MARK)}


async def find_groups(store: Store, names: Sequence[str], metrics: Metrics) -> tuple[list[Group], list[dict[str, str]]]:
    """Return the groups that exist and can be read, with all their members, and the entries that name those that cannot."""
    found = await store.groups.get_all(names, with_marks=True)
    return read_each(found, lambda entry: read_group(*entry), metrics)


def member_fields(opening: Mapping[str, Any], deadlines: Mapping[str, float]) -> dict[str, bytes]:
    """Return the fields with which rollouts of a group are created, but for a playback. `opening`: the body of its opening."""
    is_over_sampled = True if opening.get("over_sample") else None
    terms = {name: value for name, value in opening.get("rollout", {}).items() if name != "playback"}
    terms |= {**deadlines, "is_over_sampled": is_over_sampled}
    return write_fields({**terms, "group_id": opening["group_id"]})


async def members_of(store: Store, group: Group) -> list[Rollout]:
    """Return the rollouts of a group that exist, in the group's order. Raises Damaged."""
    return [read_rollout(stored) for stored in await _stored_members(store, group)]


async def read_members(store: Store, group: Group, metrics: Metrics) -> tuple[list[Rollout], list[dict[str, str]]]:
    """Return the rollouts of a group that can be read, and the entries that name the others."""
    return read_rollouts(await _stored_members(store, group), metrics)


async def _stored_members(store: Store, group: Group) -> list[StoredEntity]:
    found: list[StoredEntity] = []
    for start in range(0, len(group.members), _READ_AT_ONCE):
        names = group.members[start : start + _READ_AT_ONCE]
        found += [stored for stored in await store.get_each(names) if stored is not None]
    return found


def in_places(group: Group, rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return rollouts of a group with the members that they replace."""
    if not group.replaced:
        return list(rollouts)
    earlier, none = group.earlier, frozenset[str]()
    return [structs.replace(rollout, replaces=earlier.get(rollout.rollout_id, none)) for rollout in rollouts]


def counted(group: Group, rollouts: Sequence[Rollout]) -> tuple[Group, list[Rollout]]:
    """Return the group without the members that it does not need, and the rollouts of the others.

    It does not need those that were replaced or are surplus. Of an over-sampled group the `size` members count that were
    finished first and have a reward.
    """
    unneeded = {old: f"it failed and was replaced by {new!r}" for old, new in group.replaced.items()}
    unneeded |= {rollout.rollout_id: _SURPLUS for rollout in rollouts if rollout.reason == SURPLUS}
    kept = [rollout for rollout in in_places(group, rollouts) if rollout.rollout_id not in unneeded]
    rewarded = list(filter(is_rewarded, kept))
    if group.over_sample and len(rewarded) >= (group.size or 0):
        first = sorted(rewarded, key=lambda rollout: (rollout.finished_ms or 0, rollout.rollout_id))[: group.size]
        unneeded |= {rollout.rollout_id: _SURPLUS for rollout in kept if rollout not in first}
        kept = [rollout for rollout in kept if rollout in first]
    members = tuple(name for name in group.members if name not in unneeded)
    return structs.replace(group, members=members, unneeded=unneeded), kept


async def freeze(store: Store, clock: Clock, names: Sequence[str], claim: ClaimId) -> list[Rollout]:
    """Freeze the rewards of rollouts for a claim; return those that exist, as they are since then. Raises Damaged.

    One write to each server, and one more for each rollout that other claims froze before.
    """

    def with_claim(known: Claims) -> Claims:
        return known if claim in known else (*known, claim)

    fields, now_ms = write_claims((claim,)), clock.now_ms()
    replies = await store.update_each(dict.fromkeys(names, fields), expect=write_claims(()), now_ms=now_ms)
    found: list[StoredEntity | None] = []
    for name, reply in zip(names, replies, strict=True):
        if not isinstance(reply, FieldsChanged):
            found.append(reply)
        elif claim in (known := read_claims(reply.rollout)):
            found.append(reply.rollout)
        else:
            found.append(await _change(store, clock, name, known, with_claim))
    return [read_rollout(stored) for stored in found if stored is not None]


async def unfreeze(store: Store, clock: Clock, rollout_id: str, claim: ClaimId) -> None:
    """Remove a claim that is undone. The rewards stay frozen if there are others."""

    def without_claim(known: Claims) -> Claims:
        return tuple(other for other in known if other != claim)

    await _change(store, clock, rollout_id, (claim,), without_claim)


async def supersede(store: Store, clock: Clock, rollout_id: str, known: Claims, claim: ClaimId) -> None:
    """Remove the claims of the policy between the first and this one, so that their number is bounded.

    `known` are the claims of the rollout when it was frozen. Only for a claim that is never undone: from now on, other
    claims may rely on its freeze.
    """

    def without_earlier(known: Claims) -> Claims:
        of_policy = [other for other in known if other.policy == claim.policy]
        earlier = of_policy[1 : of_policy.index(claim)] if claim in of_policy else []
        return tuple(other for other in known if other not in earlier)

    await _change(store, clock, rollout_id, known, without_earlier)


async def _change(
    store: Store, clock: Clock, rollout_id: str, known: Claims, change: Callable[[Claims], Claims]
) -> StoredEntity | None:
    """Change the claims of a rollout; return its last known state, None if it was not read."""
    stored: StoredEntity | None = None
    while (claims := change(known)) != known:
        expect, fields = write_claims(known), write_claims(claims)
        try:
            return await store.update_if(rollout_id, fields, expect=expect, now_ms=clock.now_ms())
        except FieldsChanged as changed:
            stored, known = changed.rollout, read_claims(changed.rollout)
    return stored


def is_rewarded(rollout: Rollout) -> bool:
    """Return whether a rollout is finished with a reward of the policy: one of the `size` that an over-sampled group needs."""
    return rollout.is_finished and rollout.reward is not None and not rollout.is_inherited


def lacks_reward(rollout: Rollout) -> bool:
    """Return whether a rollout may still get a reward, and has none."""
    rewards = (rollout.reward, rollout.advantages, rollout.step_rewards or None, rollout.thread_rewards or None)
    return rollout.status in _SCORED and rewards == (None,) * 4


Ending = Literal["acked", "released", "taken_over"]
_EntryId = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}-[0-9]{1,18}$")]


class Batch(Struct, frozen=True):
    """A batch of groups for a policy, as they were queued."""

    batch_id: str
    consumer: str
    entries: tuple[tuple[str, _EntryId], ...] = field(name="held")  # groups, with their entries in the queue
    policy: str = DEFAULT_POLICY
    instance: str | None = None  # the process of the consumer that claimed it
    heartbeat_ms: Milliseconds | None = None  # how often that one extends its lease
    ended: Ending | None = None  # taken over: it missed that, and another instance of the consumer released its groups
    answer: Mapping[str, Any] | None = None  # of the request that ended it

    @property
    def held(self) -> tuple[QueuedGroup, ...]:
        """Its groups, as they were queued."""
        return tuple(QueuedGroup(group, entry_id, b"", self.policy) for group, entry_id in self.entries)


def read_batch(stored: StoredEntity) -> Batch:
    """Return the batch from its stored fields. Raises Damaged."""
    return read_fields(stored, Batch, "batch", batch_id=stored.name)


def write_batch(
    consumer: str, policy: str, held: list[QueuedGroup], *, instance: str | None = None, heartbeat_ms: int | None = None
) -> dict[str, bytes]:
    """Return the stored fields of a new batch."""
    entries = [(waiting.group, waiting.entry_id) for waiting in held]
    named = None if policy == DEFAULT_POLICY else policy
    beats = {"instance": instance, "heartbeat_ms": heartbeat_ms}
    return write_fields({"consumer": consumer, "held": entries, "policy": named, **beats})
