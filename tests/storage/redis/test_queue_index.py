"""The index of a queue: a hint beside the streams, which decide."""

import asyncio
from secrets import token_hex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.types import DEFAULT_QUEUE

LONG = {"lease_ms": 60_000, "now_ms": 9}


@pytest.fixture
async def store(redis_server, opened):
    """Return an empty store."""
    return await opened(redis_server.url, prefix=token_hex(8))


@pytest.fixture
def client(redis_server):
    with redis_server.client as client:
        yield client


async def enqueue(store, *names):
    for name in names:
        await store.groups.open(name, {}, now_ms=1)
        await store.queue.enqueue(name, {DEFAULT_QUEUE: b"note " + name.encode()}, {}, expect={}, now_ms=2)


async def listed(store):
    return [(found.group, found.note) for found in (await store.queue.read(limit=1000)).groups]


def index_of(store):
    return store.layout.groups.buckets[0].queue_index()


async def test_a_store_of_the_last_release_has_no_index_and_gets_one(store, client):
    """The first read finds what is in the streams, with its notes."""
    await enqueue(store, "a", "b", "c")
    (queued,) = [found for found in (await store.queue.read(limit=10)).groups if found.group == "a"]
    await store.queue.claim(queued, "h", {}, **LONG)
    client.delete(*index_of(store))

    assert sorted(await listed(store)) == [("b", b"note b"), ("c", b"note c")]
    assert (await store.queue.counts())[:2] == (2, 1)


async def test_a_damaged_entry_without_a_note_can_be_claimed(store, client):
    """It hides no other entry."""
    await enqueue(store, "b")
    await store.groups.open("a", {}, now_ms=1)
    stream = store.layout.groups.bucket("a").queue()
    client.xadd(stream, {"group": "a"})
    if not client.xinfo_groups(stream):
        client.xgroup_create(stream, "holders", "0")
    ((_, ((entry_id, _),)),) = client.xreadgroup("holders", "-", {stream: ">"})
    client.xclaim(stream, "holders", "-", 0, [entry_id], idle=86_400_000, justid=True)
    client.delete(*index_of(store))
    found = {queued.group: queued for queued in (await store.queue.read(limit=10)).groups}
    claimed = await store.queue.claim(found["a"], "h", {}, **LONG)

    assert {name: queued.note for name, queued in found.items()} == {"a": b"", "b": b"note b"}
    assert (claimed.queued.group, claimed.queued.note) == ("a", b"")


@pytest.mark.parametrize("unsure_ms", [1, 3_600_000])
async def test_a_group_of_which_a_claim_found_a_wrong_place_is_noted_where_it_is(store, client, monkeypatch, unsure_ms):
    """It is not listed for a while, in which it may be released; one that has left its queue is forgotten."""
    monkeypatch.setattr("storage.redis.queue._UNSURE_MS", unsure_ms)
    await enqueue(store, "a", "b")
    first, second = (await store.queue.read(limit=10)).groups
    await store.queue.claim(first, "h", {}, **LONG)
    await store.queue.claim(second, "h2", {}, **LONG)
    await store.queue.remove(second, "h2", {}, now_ms=9)
    available, leased, notes, _ = index_of(store)
    for queued in (first, second):
        client.zadd(available, {f"{queued.entry_id} {queued.group}": 1})
        client.hset(notes, f"{queued.entry_id} {queued.group}", b"=")
    client.delete(leased)
    claims = [await store.queue.claim(queued, "other", {}, **LONG) for queued in (first, second)]

    await asyncio.sleep(0.01)

    assert claims == [None, None]
    assert ([] if unsure_ms > 1 else [first.group]) == [group for group, _ in await listed(store)]
    assert sum((await store.queue.counts())[:2]) == 1


OPERATIONS = st.lists(st.tuples(st.sampled_from(["claim", "release", "remove"]), st.integers(0, 4)), max_size=10)
DAMAGE = st.lists(
    st.tuples(st.sampled_from(["free", "leased", "none", "no note"]), st.integers(0, 4), st.integers(0, 2**42)),
    max_size=6,
)


@given(OPERATIONS, DAMAGE)
async def test_a_comparison_repairs_any_index(store, client, operations, damage):
    """Afterwards it lists what the streams have without a holder, and counts what they have."""
    for key in client.keys(f"{store.layout.prefix}*"):
        client.delete(key)
    await enqueue(store, *map(str, range(5)))
    entries = {found.group: found for found in (await store.queue.read(limit=10)).groups}
    holders: dict = dict.fromkeys(entries)
    for verb, number in operations:
        name = str(number)
        if await getattr(store.queue, verb)(
            entries[name], f"h{name}", {}, **(LONG if verb == "claim" else {"now_ms": 9})
        ):
            holders[name] = {"claim": f"h{name}", "release": None, "remove": ""}[verb]
    available, leased, notes, compared = index_of(store)
    for place, number, score in damage:
        member = f"{entries[str(number)].entry_id} {number}"
        client.zrem(available, member)
        client.zrem(leased, member)
        if place in ("free", "leased"):
            client.zadd(available if place == "free" else leased, {member: score})
        elif place == "no note":
            client.hdel(notes, member)
    free = [name for name, holder in holders.items() if holder is None]
    for _ in range(2):  # a read forgets an entry without its note
        client.delete(compared)
        found = sorted(await listed(store))

    assert [(name, f"note {name}".encode()) for name in free] == found
    assert (len(free), sum(bool(holder) for holder in holders.values())) == (await store.queue.counts())[:2]


async def test_a_read_costs_the_same_with_any_number_of_leases(store, client):
    """And with any number of buckets."""
    costs = []
    for count in (10, 1000):
        names = [f"{count}-{number}" for number in range(count)]
        await enqueue(store, *names)
        for queued in (await store.queue.read(limit=2000)).groups:
            await store.queue.claim(queued, f"h{queued.group}", {}, **LONG)
        await store.queue.counts()
        before = commands(client)
        await store.queue.read(limit=1000)
        costs.append(commands(client) - before)

    assert costs[0] == costs[1]
    assert (await store.queue.counts())[:2] == (0, 1010)


def commands(client):
    """Return how many commands the server has run, with those of scripts, without INFO."""
    stats = client.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")


async def test_arrivals_are_notified(url_of, opened):
    """On a cluster as well, when a group is enqueued or released."""
    store = await opened(url_of("cluster"))
    async with store.queue.arrivals(DEFAULT_QUEUE) as arrived, asyncio.timeout(50):
        await arrived.wait()  # subscribed
        arrived.clear()
        await enqueue(store, "a")
        await arrived.wait()
        (queued,) = (await store.queue.read(limit=1)).groups
        await store.queue.claim(queued, "h", {}, **LONG)
        arrived.clear()
        await store.queue.release(queued, "h", {}, now_ms=9)
        await arrived.wait()


async def test_a_notification_that_may_not_be_sent_loses_nothing(start_redis, opened):
    """A user without channels in its ACL can enqueue; claims look every second."""
    server = start_redis()
    with server.client as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "resetchannels")
    store = await opened(f"redis://limited:secret@{server.address}")
    await enqueue(store, "a")

    assert await listed(store) == [("a", b"note a")]
