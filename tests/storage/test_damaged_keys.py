"""Keys with other bytes than the store writes: every method returns all entities, members and entries that have none."""

from secrets import token_hex

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import StoreOptions, open_store
from storage.types import DEFAULT_QUEUE, StepWrite

BYTES = st.binary(max_size=30) | st.sampled_from(
    (b"NaN", b"9" * 6000, b"-1", b"1.5", b"%ff", b"000000000000001%ff", b"")
)


@pytest.fixture
async def opened(server):
    """An empty store and a client of its server."""
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield store, client
    await store.close()


@settings(suppress_health_check=list(HealthCheck))
@given(st.sampled_from([b"birth", b"created_ms", b"touched_ms", b"n:steps", b"n:\xff", b"f:\xff", b"\xff"]), BYTES)
async def test_an_entity_of_any_bytes_is_returned_and_can_be_deleted(opened, field, value):
    """With the fields that can be read."""
    store, client = opened
    await store.open("r", {"a": b"1"}, now_ms=5)
    client.hset(store.layout.rollout("r").rollout, field, value)
    found = await store.get("r")

    assert found.fields["a"] == b"1"
    assert await store.delete("r")
    assert await store.get("r") is None


@pytest.mark.parametrize("field", ["birth", "created_ms", "touched_ms", "n:steps"])
@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b"9" * 40])
async def test_times_and_counts_that_are_none_are_named_as_damage(opened, field, value):
    """An incarnation may be any text."""
    store, client = opened
    await store.open("r", {}, now_ms=5)
    client.hset(store.layout.rollout("r").rollout, field, value)
    found = await store.get("r")

    assert (field != "birth" or not value) is (found.damage is not None)


@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(BYTES, max_size=4), st.integers(1, 3))
async def test_a_listing_with_any_members_has_every_other_name_once(opened, members, limit):
    """Pages continue behind damaged members."""
    store, client = opened
    for number in range(4):
        await store.open(f"r{number}", {}, now_ms=number)
    for member, bucket in zip(members, store.layout.buckets, strict=False):
        client.zadd(bucket.listing, {member: 0})
    names, page = [], await store.list(limit=limit)
    while page.cursor is not None:
        names += page.names
        page = await store.list(limit=limit, cursor=page.cursor)
    names += page.names
    for member, bucket in zip(members, store.layout.buckets, strict=False):
        client.zrem(bucket.listing, member)

    assert [name for name in names if name[:1] == "r" and await store.get(name)] == ["r3", "r2", "r1", "r0"]


async def test_timers_without_a_name_are_removed_and_others_returned(opened):
    store, client = opened
    await store.open("r", {}, now_ms=1, timer_ms=1)
    client.zadd(store.layout.buckets[0].timers, {b"\xff x": 0, b"r": 0, b"%ff 1": 0, b"": 0})

    assert [timer.rollout for timer in await store.timers.claim(9, now_ms=5, until_ms=6)] == ["r"]
    assert client.zcard(store.layout.buckets[0].timers) == 0


async def test_entries_of_a_queue_without_a_group_do_not_hide_others(opened):
    store, client = opened
    await store.open_group("g", {}, {}, now_ms=1)
    await store.queue.enqueue("g", {DEFAULT_QUEUE: b"note"}, {}, expect={}, now_ms=2)
    key = store.layout.groups.buckets[0].queue()
    for fields in ({"group": b"%ff", "note": b""}, {"group": b"\xff"}, {b"\xff": b"g"}):
        entry = client.xadd(key, fields)
        client.xgroup_create(key, "holders", "0", mkstream=True) if client.xlen(key) == 1 else None
        client.xreadgroup("holders", "-", {key: ">"})
        client.xclaim(key, "holders", "-", 0, [entry], idle=7 * 86_400_000, justid=True)

    index = store.layout.groups.buckets[0].queue_index()
    client.zadd(index[0], {b"1-1 %ff": 1, b"x": 2, b"1-2": 3, b"1-3 g": 4})  # the last one has no note
    client.hset(index[2], mapping=dict.fromkeys((b"1-1 %ff", b"x", b"1-2"), b"="))

    assert [queued.group for queued in (await store.queue.read(limit=9)).groups] == ["g"]
    assert ".groups:" in key.decode()


async def test_announcements_heartbeats_cached_values_and_positions_without_their_number_are_absent(opened):
    store, client = opened
    await store.announcements.announce("policy", b"1")
    rollout = await store.open("r", {}, now_ms=1)
    await store.append(StepWrite("r", rollout.incarnation, "s", b"record"), now_ms=1)
    client.hset(store.layout.buckets[0].announcements, mapping={b"other": b"1", b"\xff": b"1", b"number:\xff": b"x"})
    client.hset(store.layout.buckets[0].heartbeats, mapping={b"other": b"x", b"\xff": b"9" * 15})
    for bucket in store.layout.buckets:
        client.hset(bucket.cache[0], "name", b"x")
    client.hset(store.layout.buckets[0].processes[0], "mine", b"\xff odd default 1")
    client.hset(
        store.layout.buckets[0].processes[2], mapping={b"odd": b"1", b"calls default": b"x", b"\xff default": b"y"}
    )
    beat = await store.announcements.beat("mine", {"default": (1, 2)}, lifetime_ms=9000, known=-1)
    found = []
    for position in (b"x", b"7", b"9" * 40):
        client.hset(store.layout.rollout("r").positions, "s", position)
        found.append(await store.find("r", "s"))
    client.hset(store.layout.rollout("r").marks, b"late:\xff", b"1")

    assert (list(beat.announcements), beat.counts) == (["policy"], {"default": (2, 0)})
    assert found == [None] * 3
    assert await store.cache.get("name") is None
    assert await store.marks("r") == (await store.read_all("r", 9)).marks == {"late:\\xff": b"1"}
