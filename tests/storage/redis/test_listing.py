"""Pages of the listing and of its index, and the repair of an index that processes of 0.1.0 did not write."""

import random
from secrets import token_hex

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import StoreOptions, open_store
from storage.types import Origin, StepWrite

OPEN, DONE, RED, BLUE = b'"open"', b'"completed"', b'"red"', b'"blue"'
NAMES = [f"r{number}" for number in range(12)]


@pytest.fixture
def client(server):
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield client


@pytest.fixture(params=[16, 64])
async def store(request, server, opened):
    """An empty store with this number of buckets."""
    return await opened(f"unix:{server.socket}", prefix=token_hex(8), buckets=request.param)


async def names_of(store, field, value, limit=5, since_ms=None, until_ms=None):
    """Read all pages; None if the index may be incomplete."""
    found, cursor = [], None
    while True:
        page = await store.listing.page_of(field, value, cursor, limit, since_ms, until_ms)
        if page is None:
            return None
        found += page.names
        cursor = page.cursor
        if cursor is None:
            return found


async def finish(store, name, status=DONE):
    await store.update_if(name, {"status": status}, expect={}, now_ms=9)


async def step(store, name, policy, step_id="s1", **more):
    stored = await store.open(name, {}, now_ms=5)
    entry = StepWrite(name, stored.incarnation, step_id, b"1", first={"policy": policy}, **more)
    await store.append(entry, now_ms=6)


async def entries(store, client):
    return sum(client.zcard(bucket.indexes) for bucket in store.layout.buckets)


async def test_rollouts_are_listed_by_status_and_policy(store):
    """A new one is open and has no policy; each list is in the order of the whole listing, between two times."""
    for number in range(40):
        await store.open(f"r{number}", {}, now_ms=100 + number)
    for number in range(0, 40, 4):
        await finish(store, f"r{number}")
    for number in range(0, 40, 10):
        await step(store, f"r{number}", RED)
    done = [f"r{number}" for number in range(36, -1, -4)]

    assert done == await names_of(store, "status", DONE)
    assert [f"r{number}" for number in range(39, -1, -1) if number % 4] == await names_of(store, "status", OPEN)
    assert await names_of(store, "policy", RED, limit=1) == ["r30", "r20", "r10", "r0"]
    assert await names_of(store, "policy", BLUE) == []
    assert await names_of(store, "status", DONE, since_ms=116, until_ms=124) == ["r24", "r20", "r16"]
    assert await names_of(store, "reward", b"1") is None


async def test_a_group_opens_rollouts_that_are_listed_by_status(store):
    """The group itself is not."""
    members = [name for name in map(str, range(5000)) if store.same_slot("g", name)][:3]
    await store.open_group("g", {}, {name: {} for name in members}, now_ms=1, timer_ms=5)

    assert sorted(members) == sorted(await names_of(store, "status", OPEN))


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "delete"]), st.sampled_from(NAMES))
        | st.tuples(
            st.just("status"), st.sampled_from(NAMES), st.sampled_from([DONE, OPEN, None, b"", b"a\0b", b"x" * 300])
        )
        | st.tuples(st.just("step"), st.sampled_from(NAMES), st.sampled_from([RED, BLUE]))
    )
)
async def test_the_index_is_what_the_rollouts_are(server, operations):
    """After any operations, each value lists exactly the rollouts that have it."""
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    for number, (verb, name, *values) in enumerate(operations):
        if verb == "open":
            await store.open(name, {}, now_ms=number)
        elif verb == "delete":
            await store.delete(name)
        elif verb == "status":
            await store.update_if(name, {"status": values[0]}, expect={}, now_ms=number)
        else:
            await step(store, name, values[0], f"s{number}")
    expected = {}
    for name in (await store.list(limit=100)).names:
        fields = (await store.get(name)).fields
        for field, value in (("status", fields.get("status") or OPEN), ("policy", fields.get("policy"))):
            if value:
                expected.setdefault((field, value), []).append(name)
    found = {key: await names_of(store, *key) for key in expected}
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        count = await entries(store, client)
    await store.close()

    assert found == expected
    assert count == sum(map(len, expected.values()))


@pytest.mark.parametrize("limit", [1, 3, 100, 1000])
async def test_pages_have_the_order_of_the_whole_listing(store, limit):
    """Also if all rollouts of a page are in one bucket."""
    chance = random.Random(limit)
    same = [name for name in map(str, range(20_000)) if store.same_slot("x", name)][:40]
    others = [f"o{number}" for number in range(200)]
    times = {name: 1000 + number for number, name in enumerate(same)} | {
        name: chance.randrange(1000) for name in others
    }
    for name, now_ms in times.items():
        await store.open(name, {}, now_ms=now_ms)
    expected = sorted(times, key=lambda name: (times[name], name), reverse=True)
    found, cursor = [], None
    while True:
        page = await store.listing.page(cursor, limit)
        found += page.names
        cursor = page.cursor
        if cursor is None:
            break
        assert cursor == store.listing.cursor(page.names[-1], times[page.names[-1]])

    assert found == expected


async def test_pages_among_names_are_those_of_the_listing(store):
    """Names that do not exist are absent."""
    for number in range(20):
        await store.open(f"r{number}", {}, now_ms=100 + number)
    names = ["r3", "r19", "none", "r7", "r12"]
    first = await store.listing.page_among(names, None, 2, None, None)
    second = await store.listing.page_among(names, first.cursor, 2, None, None)

    assert (first.names, second.names, second.cursor) == (("r19", "r12"), ("r7", "r3"), None)
    assert (await store.listing.page_among(names, None, 9, 104, 112)).names == ("r12", "r7")
    with pytest.raises(ValueError, match="is not a cursor"):
        await store.listing.page_among(names, "?", 2, None, None)


async def test_expired_rollouts_leave_the_index(server, opened, client):
    """Whatever their values were."""
    store = await opened(f"unix:{server.socket}", prefix=token_hex(8), ttl_s=100)
    await step(store, "r", RED)
    await finish(store, "r")
    keys = store.layout.rollout("r")
    client.delete(*keys.all[:5])
    client.zadd(keys.expiry, {b"000000000000005r": 1})

    assert await names_of(store, "status", DONE) == []
    assert await entries(store, client) == 0
    assert await names_of(store, "policy", RED) == []


async def test_a_restored_rollout_is_listed(server, opened, client):
    """With the fields of its origin."""
    store = await opened(f"unix:{server.socket}", prefix=token_hex(8), ttl_s=100)
    stored = await store.open("r", {}, now_ms=5)
    keys = store.layout.rollout("r")
    client.delete(*keys.all[:5])
    entry = StepWrite("r", stored.incarnation, "s1", b"1", first={"policy": RED}, origin=Origin(5, {"status": DONE}))
    await store.append(entry, now_ms=6)

    assert await names_of(store, "status", DONE) == await names_of(store, "policy", RED) == ["r"]
    assert await names_of(store, "status", OPEN) == []


async def repaired(store, now_ms):
    """Repair until nothing is due."""
    while await store.listing.repair(now_ms):
        pass


async def test_an_index_that_lacks_entries_is_not_used_until_it_is_repaired(store, server, opened, client):
    """0.1.0 writes rollouts without entries, and changes and deletes without them."""
    old = await opened(f"unix:{server.socket}", prefix=store.layout.prefix, indexed={})
    for number in range(250):
        await (old if number % 5 else store).open(f"r{number}", {}, now_ms=number)
    await store.open("changed", {}, now_ms=500)
    await store.open("deleted", {}, now_ms=501)
    await finish(old, "r1")
    before = await names_of(store, "status", DONE)
    await store.listing.look_for_repairs()
    await repaired(store, 1000)
    during = await names_of(store, "status", DONE)
    await finish(old, "changed")
    await old.delete("deleted")
    await repaired(store, 1000 + 600_000)
    wrong = await names_of(store, "status", OPEN)
    await repaired(store, 1000 + 2 * 600_000)

    assert before is during is wrong is None
    assert await names_of(store, "status", DONE) == ["changed", "r1"]
    assert len(await names_of(store, "status", OPEN)) == 249
    assert await entries(store, client) == 251
    await store.listing.look_for_repairs()
    assert not await store.listing.repair(10**9)


async def test_what_the_last_release_finishes_is_listed_after_it_has_ended(store, server, opened, client):
    """The index lacks no entry, so it is repaired while such a process sends heartbeats, and once more ten minutes later."""
    old, key = await opened(f"unix:{server.socket}", prefix=store.layout.prefix, indexed={}), store.layout.buckets[0]
    for number in range(3):
        await store.open(f"r{number}", {}, now_ms=number)
    client.hset(key.heartbeats, mapping={"old": b"%015d[0,0]" % 10**14, "~": b"%015d[0,0]" % 10**14})
    await store.listing.look_for_repairs()
    await repaired(store, 1000)
    await finish(old, "r1")
    client.hdel(key.heartbeats, "old")
    await store.listing.look_for_repairs()
    during = await names_of(store, "status", DONE)
    for times in (1, 2):
        await repaired(store, 1000 + times * 600_000)

    assert during is None
    assert await names_of(store, "status", DONE) == ["r1"]


async def test_a_store_of_this_version_needs_no_repair(store):
    """Also one that is empty."""
    await store.listing.look_for_repairs()
    empty = await store.listing.repair(10**9)
    await store.open("r", {}, now_ms=1)
    await store.listing.look_for_repairs()

    assert (empty, await store.listing.repair(10**9)) == (False, False)
