"""A group, read from the store's fields and marks."""

import asyncio
from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fakes import FailingStore

from proxy.clock import SystemClock
from proxy.errors import Conflict
from proxy.rollouts.group import (
    FINISHED_MARK,
    MEMBER_MARK,
    STATUSES,
    find_group,
    join,
    mark_finished,
    read_batch,
    read_group,
    state_fields,
    write_batch,
)
from storage.types import QueuedGroup, StoredEntity


def stored(**fields):
    return StoredEntity("g", "b", 1, 2, {name: orjson.dumps(value) for name, value in fields.items()}, {})


def marks(**members):
    return {kind + name: b"" for name, kinds in members.items() for kind in kinds}


def test_an_opened_group_has_its_rollouts_in_order():
    group = read_group(stored(size=2, members=["z", "a"]), marks(z=[FINISHED_MARK]))

    assert (group.size, group.members, group.finished, group.status_at(0)) == (2, ("z", "a"), {"z"}, "open")
    assert not group.is_full


def test_a_group_created_by_calls_has_its_members_by_name():
    """Without a size it is never full."""
    group = read_group(stored(), marks(b=[MEMBER_MARK, FINISHED_MARK], a=[MEMBER_MARK, FINISHED_MARK]))

    assert (group.size, group.members) == (None, ("a", "b"))
    assert not group.is_full


def test_a_group_is_full_when_all_its_own_members_are_finished():
    members = {"size": 2, "members": ["a", "b"]}

    assert read_group(stored(**members), marks(a=[FINISHED_MARK], b=[FINISHED_MARK])).is_full
    assert not read_group(stored(**members), marks(a=[FINISHED_MARK], c=[FINISHED_MARK])).is_full


def test_after_its_lease_expired_a_claimed_group_is_complete():
    group = read_group(stored(status="claimed", lease_ms=100))

    assert [group.status_at(99), group.status_at(100)] == ["claimed", "complete"]
    assert read_group(stored(status="done", lease_ms=100)).status_at(1000) == "done"


STATES = st.dictionaries(st.sampled_from(["default", "planner", "a.b"]), st.sampled_from(STATUSES[1:]), min_size=1)


@given(STATES)
def test_a_group_has_the_first_status_that_it_has_for_a_policy(states):
    """In the order open, complete, claimed, done, dropped; a policy that does not have the group has none."""
    written = [state_fields(policy, status=status, lease_ms=5, why=None) for policy, status in states.items()]
    fields = {name: value for own in written for name, value in own.items() if value is not None}
    group = read_group(StoredEntity("g", "b", 1, 2, fields, {}))

    assert next(status for status in STATUSES if status in states.values()) == group.status_at(4)
    assert states == {policy: group.status_for(policy, 4) for policy in states}
    assert (group.status_for("other", 4), group.is_open) == (None, False)


def test_the_state_of_the_default_policy_has_fields_without_a_suffix():
    """As without named policies; an open group has no state, and is open for every policy."""
    assert state_fields("default", status="done", batch_id=None) == {"status": b'"done"', "batch_id": None}
    assert state_fields("planner", status="done") == {"status:planner": b'"done"'}
    assert (
        read_group(stored(size=1)).status_at(0),
        read_group(stored(size=1)).status_for("planner", 0),
        read_group(stored(size=1)).is_open,
    ) == ("open", "open", True)


def test_a_batch_is_read_as_it_was_written():
    """Groups keep their entry IDs; notes are dropped."""
    fields = write_batch("trainer", "default", [QueuedGroup("g1", "5-0", b"note"), QueuedGroup("a/b", "6-1", b"")])
    batch = read_batch(StoredEntity("b", "incarnation", 1, 1, fields, {}))

    assert (batch.batch_id, batch.consumer, batch.ended, batch.answer) == ("b", "trainer", None, None)
    assert (QueuedGroup("g1", "5-0", b""), QueuedGroup("a/b", "6-1", b"")) == batch.held


def test_a_batch_of_a_named_policy_has_its_groups_in_the_queue_of_the_policy():
    """A batch of the default policy is stored without a policy's name."""
    batch = read_batch(StoredEntity("b", "i", 1, 1, write_batch("t", "planner", [QueuedGroup("g", "5-0", b"")]), {}))

    assert ("planner", (QueuedGroup("g", "5-0", b"", "planner"),)) == (batch.policy, batch.held)
    assert write_batch("t", "default", []).keys() == {"consumer", "held"}


def test_an_ended_batch_has_its_response():
    fields = {**write_batch("t", "default", []), "ended": b'"acked"', "answer": orjson.dumps({"acked": ["g"]})}
    batch = read_batch(StoredEntity("b", "incarnation", 1, 1, fields, {}))

    assert (batch.ended, batch.answer) == ("acked", {"acked": ["g"]})


CLOCK = SystemClock()


async def opened(store, name="r1"):
    return await store.open(name, {}, now_ms=1)


async def test_joining_creates_the_group_and_is_idempotent(store):
    rollouts = [await opened(store, name) for name in ("r2", "r1", "r2")]
    await asyncio.gather(*(join(store, CLOCK, rollout, "g") for rollout in rollouts))

    assert (await find_group(store, "g")).members == ("r1", "r2")


async def test_only_its_own_rollouts_can_join_an_opened_group(store):
    """A rollout that was created for the join is deleted; an existing one remains."""
    name = next(name for name in (f"m{n}" for n in range(1000)) if store.same_slot("g", name))
    await store.open_group("g", {"size": b"1", "members": b'["%s"]' % name.encode()}, {name: {}}, now_ms=1)
    existing = await opened(store, "existing")

    await join(store, CLOCK, await opened(store, name), "g")
    for rollout in (await opened(store, "new"), await opened(store, existing.name)):
        with pytest.raises(Conflict, match="not one of them"):
            await join(store, CLOCK, rollout, "g")

    assert await store.get("new") is None
    assert await store.get("existing") is not None
    assert (await find_group(store, "g")).members == (name,)


async def test_a_group_that_is_deleted_during_a_join_is_created_again(store):
    groups = FailingStore(store.groups)
    groups.waiting["mark"] = asyncio.Event()
    task = asyncio.ensure_future(join(SimpleNamespace(groups=groups), CLOCK, await opened(store), "g"))
    groups.reached["mark"] = asyncio.Event()
    await groups.reached["mark"].wait()
    await store.groups.delete("g")
    groups.waiting.pop("mark").set()
    await task

    assert (await find_group(store, "g")).members == ("r1",)


async def test_finished_members_are_marked_in_this_incarnation_of_the_group(store):
    await join(store, CLOCK, await opened(store), "g")
    group = await find_group(store, "g")
    await mark_finished(store, CLOCK, group, ["r1"])

    assert (await find_group(store, "g")).finished == {"r1"}

    await store.groups.delete("g")
    await store.groups.open("g", {}, now_ms=1)
    await mark_finished(store, CLOCK, group, ["r1"])

    assert (await find_group(store, "g")).finished == frozenset()
    assert read_group(await store.groups.get("g")).members == ()
