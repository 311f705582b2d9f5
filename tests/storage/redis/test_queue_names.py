"""Several queues of the same groups: each is independent of the others."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import FieldsChanged
from storage.types import DEFAULT_QUEUE

QUEUES = (DEFAULT_QUEUE, "planner", "a.b-C_1")
LONG = {"lease_ms": 60_000, "now_ms": 9}


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def each_store(request, url_of, opened):
    """Return an empty store of each kind."""
    return await opened(url_of(request.param))


async def enqueue(store, group, *queues):
    await store.open_group(group, {}, {}, now_ms=1)
    notes = {queue: f"{group} in {queue}".encode() for queue in queues}
    await store.queue.enqueue(group, notes, {"status": b"1"}, expect={"status": None}, now_ms=2)


async def available(store, queue):
    return {entry.group: entry for entry in await store.queue.list_available(1000, queue)}


async def test_a_group_is_enqueued_in_all_its_queues_with_a_note_for_each(each_store):
    """In one transaction; a queue lists and counts its own entries only."""
    await enqueue(each_store, "g", *QUEUES)
    await enqueue(each_store, "h", "planner")
    listed = {queue: await available(each_store, queue) for queue in (*QUEUES, "none")}
    counts = [(await each_store.queue.counts(queue)).available for queue in (*QUEUES, "none")]

    assert [["g"], ["g", "h"], ["g"], []] == [sorted(entries) for entries in listed.values()]
    assert [1, 2, 1, 0] == counts
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

    assert 1 == sum(await asyncio.gather(*(attempt() for _ in range(8))))
    assert [1, 1, 1] == [len(await available(each_store, queue)) for queue in QUEUES]


async def test_holders_in_different_queues_do_not_exclude_each_other(each_store):
    """An entry of one queue is no entry of another, even with its ID."""
    await enqueue(each_store, "g", *QUEUES)
    entries = [(await available(each_store, queue))["g"] for queue in QUEUES]

    assert [True] * 3 == [
        await each_store.queue.claim(entry, f"h{number}", {}, **LONG) for number, entry in enumerate(entries)
    ]
    assert not await each_store.queue.extend(entries[0], "h1", {}, **LONG)
    assert await each_store.queue.remove(entries[1], "h1", {"done": b"1"}, now_ms=9)
    assert await each_store.queue.release(entries[2], "h2", {}, now_ms=9)
    assert [(0, 1), (0, 0), (1, 0)] == [(await each_store.queue.counts(queue))[:2] for queue in QUEUES]


async def test_a_deleted_group_is_removed_from_each_queue_when_it_is_claimed(each_store):
    await enqueue(each_store, "g", *QUEUES)
    entries = [(await available(each_store, queue))["g"] for queue in QUEUES]
    await each_store.groups.delete("g")
    claims = [await each_store.queue.claim(entry, "h", {}, **LONG) for entry in entries]

    assert [False] * 3 == claims
    assert [(0, 0)] * 3 == [(await each_store.queue.counts(queue))[:2] for queue in QUEUES]


async def test_many_entries_of_one_queue_do_not_hide_those_of_another(each_store):
    """A limit is that of the queue."""
    for number in range(60):
        await enqueue(each_store, f"first{number}", "planner")
    await enqueue(each_store, "last", DEFAULT_QUEUE)

    assert ["last"] == list(await available(each_store, DEFAULT_QUEUE))
    assert ["last"] == [entry.group for entry in await each_store.queue.list_available(1)]


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
        succeeded = await getattr(store.queue, verb)(entry, f"{holder} in {queue}", {"by": holder.encode()}, **timing)

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
