"""The guarantees of `Queue`, tested on every kind of server."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import FieldsChanged
from storage.types import DEFAULT_QUEUE, MAX_LEASE_MS

LONG = {"lease_ms": 60_000, "now_ms": 9}
SHORT = {"lease_ms": 30, "now_ms": 9}


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """Return an empty store."""
    return await opened(url_of(request.param))


async def enqueued(store, *names):
    """Create and enqueue groups; return all available groups by name."""
    for name in names:
        await store.open_group(name, {}, {}, now_ms=1)
        notes = {DEFAULT_QUEUE: b"note " + name.encode()}
        await store.queue.enqueue(name, notes, {"status": b"1"}, expect={"status": None}, now_ms=2)
    return await available(store, DEFAULT_QUEUE)


async def listed(store, queue=DEFAULT_QUEUE, limit=1000):
    return (await store.queue.read(queue, limit=limit)).groups


async def extend(store, queued, holder, fields, **timing):
    return (await store.queue.extend({queued: fields}, holder, **timing))[0]


async def field(store, name, group="g"):
    return (await store.groups.get(group)).fields.get(name)


async def test_enqueue_adds_a_group_with_its_note_and_sets_fields(store):
    """In one transaction; a group that does not exist cannot be enqueued."""
    queued = (await enqueued(store, "g"))["g"]

    assert queued.note == b"note g"
    assert await field(store, "status") == b"1"
    assert await store.queue.enqueue("none", {DEFAULT_QUEUE: b""}, {}, expect={}, now_ms=1) is None


async def test_one_of_concurrent_enqueues_with_the_same_expected_value_succeeds(store):
    """The others get the current state."""
    await store.open_group("g", {}, {}, now_ms=1)

    async def enqueue():
        try:
            await store.queue.enqueue("g", {"a": b"", "b": b""}, {"status": b"1"}, expect={"status": None}, now_ms=2)
        except FieldsChanged as changed:
            return changed.rollout.fields
        return "enqueued"

    results = await asyncio.gather(*(enqueue() for _ in range(10)))

    assert results.count("enqueued") == 1
    assert results.count({"status": b"1"}) == 9
    assert [len(await listed(store, name)) for name in ("a", "b")] == [1, 1]


async def test_groups_are_listed_in_the_order_in_which_they_were_enqueued(store):
    """Of all buckets; groups of one millisecond are in any order."""
    names = [f"g{n}" for n in range(40)]
    queued = await enqueued(store, *names)
    ages = [int(group.entry_id.partition("-")[0]) for group in queued.values()]
    by_name = [int(queued[name].entry_id.partition("-")[0]) for name in names]

    assert sorted(ages) == ages == by_name
    assert ages[:3] == [int(group.entry_id.partition("-")[0]) for group in await listed(store, limit=3)][:3]


async def test_one_of_concurrent_claims_succeeds(store):
    """The successful claim writes the fields."""
    queued = (await enqueued(store, "g"))["g"]

    claims = await asyncio.gather(
        *(store.queue.claim(queued, f"h{n}", {"held_by": b"h%d" % n}, **LONG) for n in range(20))
    )

    assert len(winners := [number for number, claimed in enumerate(claims) if claimed]) == 1
    assert b"h%d" % winners[0] == await field(store, "held_by")
    assert await listed(store, limit=10) == []


async def test_a_repeated_claim_of_the_same_holder_succeeds(store):
    """A holder can repeat a claim if its response was lost."""
    queued = (await enqueued(store, "g"))["g"]

    assert await store.queue.claim(queued, "h", {}, **LONG)
    assert await store.queue.claim(queued, "h", {}, **LONG)
    assert not await store.queue.claim(queued, "other", {}, **LONG)


async def test_another_holder_can_claim_after_the_lease(store, until):
    """Then the first holder can neither extend, release nor remove the group, and changes no field."""
    queued = (await enqueued(store, "g"))["g"]
    await store.queue.claim(queued, "h", {"held_by": b"h"}, **SHORT)
    assert not await store.queue.claim(queued, "early", {}, **LONG)
    await until(lambda: store.queue.claim(queued, "next", {"held_by": b"next"}, **LONG))

    assert not await extend(store, queued, "h", {"held_by": b"h"}, **LONG)
    assert not await store.queue.release(queued, "h", {"held_by": None}, now_ms=9)
    assert not await store.queue.remove(queued, "h", {"held_by": None}, now_ms=9)
    assert await field(store, "held_by") == b"next"
    assert await store.queue.remove(queued, "next", {}, now_ms=9)


async def test_an_expired_lease_can_be_extended_if_no_other_holder_has_claimed(store, until):
    """Finished work is not lost because it is late."""
    queued = (await enqueued(store, "g"))["g"]
    await store.queue.claim(queued, "h", {}, **SHORT)

    async def is_available():
        return [queued] == await listed(store, limit=1)

    await until(is_available)

    assert await extend(store, queued, "h", {}, **LONG)
    assert await listed(store, limit=1) == []
    assert await store.queue.remove(queued, "h", {}, now_ms=9)


async def test_a_holder_that_does_not_extend_in_time_is_overdue(store, until):
    """For its consumer; one that has extended, or is forgotten, is not."""
    queued = await enqueued(store, "a", "b")

    async def overdue(consumer):
        return (await store.queue.read(consumer=consumer)).overdue

    for name, holder in (("a", "h"), ("b", "other")):
        await store.queue.claim(queued[name], holder, {}, **LONG)
        assert await store.queue.extend({queued[name]: {}}, holder, **LONG, watch=("trainer", 1)) == [True]

    async def are_overdue():
        return {"h", "other"} == {*await overdue("trainer")}

    await until(are_overdue)
    await store.queue.extend({queued["a"]: {}}, "h", **LONG, watch=("trainer", 60_000))

    assert await overdue("trainer") == ["other"]
    await store.queue.forget("trainer", "other")
    assert await overdue("trainer") == await overdue("evaluator") == await overdue(None) == []


async def test_a_group_is_released_in_place_of_a_holder_that_is_silent_only(store, until):
    """Then the holder has it no more; a holder that extended in time keeps it."""
    queued = (await enqueued(store, "g"))["g"]
    await store.queue.claim(queued, "h", {"held_by": b"h"}, **LONG)
    assert not await store.queue.release(queued, "h", {"held_by": None}, now_ms=9, silent_ms=3_600_000)
    assert await field(store, "held_by") == b"h"
    await until(lambda: store.queue.release(queued, "h", {"held_by": None}, now_ms=9, silent_ms=30))

    assert await listed(store, limit=10) == [queued]
    assert await field(store, "held_by") is None
    assert not await extend(store, queued, "h", {}, **LONG)


async def test_a_released_group_keeps_its_position(store):
    """The oldest group stays the oldest."""
    queued = await enqueued(store, "a", "b")
    await store.queue.claim(queued["a"], "h", {}, **LONG)

    assert await store.queue.release(queued["a"], "h", {"released": b"1"}, now_ms=9)
    assert [group.group for group in await listed(store, limit=10)] == ["a", "b"]
    assert await field(store, "released", "a") == b"1"


async def test_a_removed_group_has_no_entry(store, command):
    """Removing again has no effect."""
    queued = (await enqueued(store, "g"))["g"]
    await store.queue.claim(queued, "h", {}, **LONG)

    assert await store.queue.remove(queued, "h", {"status": b"2"}, now_ms=9)
    assert not await store.queue.remove(queued, "h", {"status": b"3"}, now_ms=9)
    assert not await store.queue.claim(queued, "h", {}, **LONG)
    assert await field(store, "status") == b"2"
    assert await listed(store, limit=10) == []


async def test_consumers_of_former_holders_are_deleted(store, until, on_redis, command):
    """After a hundred holders, only the consumer `-` exists."""
    queued = (await enqueued(on_redis, "g"))["g"]
    for number in range(100):
        await on_redis.queue.claim(queued, f"h{number}", {}, **LONG)
        await on_redis.queue.release(queued, f"h{number}", {}, now_ms=9)
    (key,) = (await command(on_redis, "KEYS", "*:queue"))[0]

    assert [consumer[1] for consumer in (await command(on_redis, "XINFO", "CONSUMERS", key, "holders"))[0]] == [b"-"]


async def test_a_claim_removes_the_entry_of_a_deleted_group(store):
    """The claim does not create the group again."""
    queued = (await enqueued(store, "g"))["g"]
    await store.groups.delete("g")

    assert not await store.queue.claim(queued, "h", {"held_by": b"h"}, **LONG)
    assert await store.groups.get("g") is None
    assert await listed(store, limit=10) == []


async def test_a_claim_in_an_unused_queue_fails(store):
    """It changes nothing."""
    queued = (await enqueued(store, "g"))["g"]
    elsewhere = replace(queued, group="other")

    assert not await store.queue.claim(elsewhere, "h", {}, **LONG)
    assert await listed(store, limit=10) == [queued]


@pytest.mark.parametrize("lease_ms", [0, -1, MAX_LEASE_MS + 1])
async def test_an_invalid_lease_is_refused(on_redis, lease_ms):
    """The maximum is one day."""
    queued = (await enqueued(on_redis, "g"))["g"]

    with pytest.raises(ValueError, match="lease"):
        await on_redis.queue.claim(queued, "h", {}, lease_ms=lease_ms, now_ms=1)


async def test_a_claim_removes_the_entry_of_an_expired_group(url_of, opened, until):
    """With a TTL, groups expire while they are in the queue."""
    store = await opened(url_of("redis"), ttl_s=1)
    queued = (await enqueued(store, "g"))["g"]

    async def is_gone():
        return await store.groups.get("g") is None

    await until(is_gone)

    assert not await store.queue.claim(queued, "h", {}, **LONG)
    assert await listed(store, limit=10) == []


async def test_the_counts_are_of_available_and_of_claimed_groups(store):
    """A group with an expired lease is available; the oldest group that was never claimed determines the age."""
    empty = await store.queue.counts()
    queued = await enqueued(store, *map(str, range(20)))
    before = await store.queue.counts()
    for number in range(7):
        assert await store.queue.claim(queued[str(number)], f"batch{number % 3}", {}, **LONG)
    assert await store.queue.claim(queued["7"], "short", {}, lease_ms=1, now_ms=9)
    while (after := await store.queue.counts()).claimed > 7:
        await asyncio.sleep(0.001)
    assert await store.queue.release(queued["0"], "batch0", {}, now_ms=9)
    assert await store.queue.remove(queued["1"], "batch1", {}, now_ms=9)
    done = await store.queue.counts()

    assert empty == (0, 0, 0)
    assert before[:2] == (20, 0)
    assert after[:2] == (13, 7)
    assert done[:2] == (14, 5)
    assert all(0 <= counts.oldest_age_ms < 60_000 for counts in (before, after, done))


QUEUES = (DEFAULT_QUEUE, "planner", "a.b-C_1")


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def each_store(request, url_of, opened):
    """Return an empty store of each kind."""
    return await opened(url_of(request.param))


async def enqueue(store, group, *queues):
    await store.open_group(group, {}, {}, now_ms=1)
    notes = {queue: f"{group} in {queue}".encode() for queue in queues}
    await store.queue.enqueue(group, notes, {"status": b"1"}, expect={"status": None}, now_ms=2)


async def available(store, queue):
    return {entry.group: entry for entry in await listed(store, queue)}


async def test_a_group_is_enqueued_in_all_its_queues_with_a_note_for_each(each_store):
    """In one transaction; a queue lists and counts its own entries only."""
    await enqueue(each_store, "g", *QUEUES)
    await enqueue(each_store, "h", "planner")
    listed = {queue: await available(each_store, queue) for queue in (*QUEUES, "none")}
    counts = [(await each_store.queue.counts(queue)).available for queue in (*QUEUES, "none")]

    assert [sorted(entries) for entries in listed.values()] == [["g"], ["g", "h"], ["g"], []]
    assert counts == [1, 2, 1, 0]
    assert [(queue, f"g in {queue}".encode()) for queue in QUEUES] == [
        (listed[queue]["g"].queue, listed[queue]["g"].note) for queue in QUEUES
    ]


async def test_a_group_without_the_expected_fields_is_enqueued_in_no_queue(each_store):
    """Concurrent attempts add one entry to each queue."""
    await each_store.open_group("g", {}, {}, now_ms=1)

    async def attempt():
        notes = dict.fromkeys(QUEUES, b"")
        try:
            await each_store.queue.enqueue("g", notes, {"status": b"1"}, expect={"status": None}, now_ms=2)
        except FieldsChanged:
            return 0
        return 1

    assert sum(await asyncio.gather(*(attempt() for _ in range(8)))) == 1
    assert [len(await available(each_store, queue)) for queue in QUEUES] == [1, 1, 1]


async def test_holders_in_different_queues_do_not_exclude_each_other(each_store):
    """An entry of one queue is no entry of another, even with its ID."""
    await enqueue(each_store, "g", *QUEUES)
    entries = [(await available(each_store, queue))["g"] for queue in QUEUES]

    assert [
        None is not await each_store.queue.claim(entry, f"h{number}", {}, **LONG)
        for number, entry in enumerate(entries)
    ] == [True] * 3
    assert not await extend(each_store, entries[0], "h1", {}, **LONG)
    assert await each_store.queue.remove(entries[1], "h1", {"done": b"1"}, now_ms=9)
    assert await each_store.queue.release(entries[2], "h2", {}, now_ms=9)
    assert [(await each_store.queue.counts(queue))[:2] for queue in QUEUES] == [(0, 1), (0, 0), (1, 0)]


async def test_a_deleted_group_is_removed_from_each_queue_when_it_is_claimed(each_store):
    await enqueue(each_store, "g", *QUEUES)
    entries = [(await available(each_store, queue))["g"] for queue in QUEUES]
    await each_store.groups.delete("g")
    claims = [await each_store.queue.claim(entry, "h", {}, **LONG) for entry in entries]

    assert claims == [None] * 3
    assert [(await each_store.queue.counts(queue))[:2] for queue in QUEUES] == [(0, 0)] * 3


async def test_many_entries_of_one_queue_do_not_hide_another_queue(each_store):
    """Each queue has its own limit."""
    for number in range(60):
        await enqueue(each_store, f"first{number}", "planner")
    await enqueue(each_store, "last", DEFAULT_QUEUE)

    assert list(await available(each_store, DEFAULT_QUEUE)) == ["last"]
    assert [entry.group for entry in await listed(each_store, limit=1)] == ["last"]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "extend", "release", "remove"]),
        st.sampled_from(["g", "h"]),
        st.sampled_from(QUEUES),
        st.sampled_from(["one", "two"]),
    ),
    max_size=25,
)


@given(OPERATIONS)
async def test_any_operations_change_the_holder_in_their_own_queue_only(store, operations):
    """As in a model that has one holder for each entry."""
    for group in ("g", "h"):
        for queue in QUEUES:  # entries of an earlier example
            for entry in (await available(store, queue)).values():
                await store.queue.claim(entry, "last", {}, **LONG)
                await store.queue.remove(entry, "last", {}, now_ms=9)
        await store.groups.delete(group)
    for group in ("g", "h"):
        await enqueue(store, group, *QUEUES)
    entries = {(queue, name): entry for queue in QUEUES for name, entry in (await available(store, queue)).items()}
    holders: dict = dict.fromkeys(entries)
    for verb, group, queue, holder in operations:
        entry = entries[queue, group]
        now = holders.get((queue, group), "removed")
        timing = LONG if verb in ("claim", "extend") else {"now_ms": 9}
        name, fields = f"{holder} in {queue}", {"by": holder.encode()}
        if verb == "extend":
            succeeded = await extend(store, entry, name, fields, **timing)
        else:
            succeeded = bool(await getattr(store.queue, verb)(entry, name, fields, **timing))

        assert succeeded == (now == holder or (now is None and verb in ("claim", "release")))
        if succeeded and verb == "remove":
            del holders[queue, group]
        elif succeeded:
            holders[queue, group] = None if verb == "release" else holder
    for queue in QUEUES:
        free = {group for (own, group), holder in holders.items() if own == queue and holder is None}
        assert free == set(await available(store, queue))
    for entry, holder in holders.items():  # so that the next example begins without them
        if holder is not None:
            await store.queue.remove(entries[entry], f"{holder} in {entry[0]}", {}, now_ms=9)
