"""Store: lifetimes, lost responses, paging, prefixes."""

import asyncio
from collections import OrderedDict
from secrets import token_hex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import StoreOptions, open_store
from storage.redis.keys import Layout
from storage.types import StepWrite


@pytest.fixture(params=["redis", "cluster"])
async def mortal(request, url_of, opened):
    """Return an empty store that expires rollouts."""
    return await opened(url_of(request.param), ttl_s=100)


async def filled(store, name="r"):
    """Create a rollout with every kind of key and return its incarnation."""
    incarnation = (await store.open(name, {"a": b"1"}, now_ms=1)).incarnation
    await store.append(StepWrite(name, incarnation, "s1", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2)
    await store.mark(name, incarnation, {"m": b"1"}, now_ms=3)
    return incarnation


async def on_key(store, verb, key, *more):
    (reply,) = await store._servers.execute(key, [(verb, key, *more)])
    return reply


@pytest.mark.parametrize("kind", ["embedded", "redis", "cluster"])
async def test_an_idle_rollout_expires_and_leaves_no_key(url_of, opened, key_count, until, kind):
    """With a TTL, a rollout without writes expires with all its keys."""
    store = await opened(url_of(kind), ttl_s=2)
    incarnation = await filled(store)

    async def is_empty():
        return await key_count(store) == 0

    await until(is_empty)

    assert None is await store.get("r")
    assert (await store.list()).names == ()
    with pytest.raises(Exception, match="expired"):
        await store.append(StepWrite("r", incarnation, "s2", b"2"), now_ms=4)
    assert await is_empty()


async def test_every_write_restarts_all_lifetimes(mortal):
    """Each write sets the expiry of all keys of the rollout, and of its member of the listing."""
    incarnation = await filled(mortal)
    keys = mortal.layout.rollout("r").all
    writes = (
        lambda: mortal.open("r", {}, now_ms=5),
        lambda: mortal.append(StepWrite("r", incarnation, "s2", b"2"), now_ms=5),
        lambda: mortal.append(StepWrite("r", incarnation, "s2", b"2"), now_ms=5),
        lambda: mortal.mark("r", incarnation, {"m": b"2"}, now_ms=5),
        lambda: mortal.update_if("r", {"a": b"2"}, expect={}, now_ms=5),
    )
    for write in writes:
        for key in keys:
            await on_key(mortal, "PEXPIRE", key, 5_000)
        await write()

        assert all([await on_key(mortal, "PTTL", key) > 90_000 for key in keys])


async def test_reads_do_not_restart_lifetimes(mortal):
    """A read does not keep a rollout alive."""
    await filled(mortal)
    keys = mortal.layout.rollout("r").all
    for key in keys:
        await on_key(mortal, "PEXPIRE", key, 5_000)

    await mortal.get("r")
    await mortal.read("r", 0, 9)
    await mortal.marks("r")
    await mortal.find("r", "s1")
    await mortal.list()

    assert all([await on_key(mortal, "PTTL", key) <= 5_000 for key in keys])


async def test_without_a_ttl_nothing_expires(on_redis, command):
    """By default, no key has an expiry."""
    await filled(on_redis)

    (info,) = await command(on_redis, "INFO", "keyspace")
    assert b"expires=0" in info


async def test_expired_rollouts_are_not_listed(mortal):
    """Even if other rollouts of the bucket exist."""
    keys = await with_an_expired_one(mortal)

    assert (await mortal.list()).names == ("other",)
    assert await on_key(mortal, "ZCOUNT", keys.expiry, "-inf", 1_000) == 0


async def test_writes_remove_expired_members(mortal):
    """Expired members are removed by writes, even if the listing is never read."""
    keys = await with_an_expired_one(mortal)

    await mortal.update_if("other", {}, expect={}, now_ms=2)

    assert await on_key(mortal, "ZCARD", keys.listing) == 1
    assert await on_key(mortal, "ZCARD", keys.expiry) == 1


async def with_an_expired_one(store):
    """Create a rollout in a bucket in which another one has expired; return its keys."""
    keys = store.layout.rollout("other")
    expired = next(name for name in map(str, range(1000)) if store.same_slot("other", name))
    await filled(store, "other")
    await filled(store, expired)
    expired_keys = store.layout.rollout(expired)
    for key in expired_keys.all[:5]:
        await on_key(store, "DEL", key)
    await on_key(store, "ZADD", keys.expiry, 1_000, b"000000000000001" + expired_keys.encoded)
    assert await on_key(store, "ZCARD", keys.listing) == 2
    return keys


async def test_a_repeated_round_trip_has_the_same_effect(on_redis):
    """A round trip that is repeated because its response was lost has the effect of one."""
    execute, calls = on_redis._servers.execute, 0

    async def execute_twice(key, commands, **options):
        nonlocal calls
        calls += 1
        await execute(key, commands, **options)
        return await execute(key, commands, **options)

    on_redis._servers.execute = execute_twice
    made = await on_redis.open("r", {"a": b"1"}, now_ms=1)
    index, *_ = await on_redis.append(
        StepWrite("r", made.incarnation, "s", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2
    )
    await on_redis.mark("r", made.incarnation, {"m": b"1"}, now_ms=3)

    assert calls == 3
    assert made.created
    assert index == 0
    assert await on_redis.read("r", 0, 9) == [b"1"]
    assert (await on_redis.get("r")).counts == {"steps": 1}


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(min_size=1, max_size=20), st.integers(0, 50), max_size=25),
    st.integers(1, 8),
    st.integers(0, 50),
)
async def test_paging_lists_all_rollouts_since_a_time_newest_first(on_redis, command, rollouts, limit, since_ms):
    """For any creation times and page size."""
    await command(on_redis, "FLUSHALL")
    await asyncio.gather(*(on_redis.open(name, {}, now_ms=ms) for name, ms in rollouts.items()))

    seen, cursor = [], None
    while True:
        page = await on_redis.list(cursor=cursor, limit=limit, since_ms=since_ms)
        seen += page.names
        cursor = page.cursor
        if cursor is None:
            break

    assert sorted(name for name, ms in rollouts.items() if ms >= since_ms) == sorted(seen)
    assert sorted((rollouts[name] for name in seen), reverse=True) == [rollouts[name] for name in seen]


async def test_stores_with_different_prefixes_are_separate(url_of, opened, on_redis):
    """Two stores with different prefixes on one server share no data."""
    other = await opened(url_of("redis"), prefix="tt:other")
    await filled(on_redis)

    assert None is await other.get("r")
    assert (await other.list()).names == ()
    assert not await other.delete("r")
    assert await other.set_once("c", b"theirs") == b"theirs"
    assert await on_redis.set_once("c", b"ours") == b"ours"


LONG_S = 3600
LARGE = 2**20
HOSTILE = ("a b", "a", "%20", "{a}", "a\nb", "🙂", "x" * 256)
HEAD = 15  # bytes of the expiry time before each value


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """Return an empty store."""
    return await opened(url_of(request.param))


async def test_a_value_is_returned_until_it_expires(store):
    """Any bytes under any name; another process reads it too."""
    for number, name in enumerate(HOSTILE):
        await store.cache.put(name, bytes([0, number, 255]), lifetime_s=LONG_S, limit=LARGE)

    assert [bytes([0, number, 255]) for number in range(len(HOSTILE))] == [
        await store.cache.get(name) for name in HOSTILE
    ]
    assert None is await store.cache.get("other")


async def test_an_expired_value_is_gone(store):
    """The keys of the cache expire with their newest value."""
    await store.cache.put("a", b"1", lifetime_s=1, limit=LARGE)
    while await store.cache.get("a") is not None:
        await asyncio.sleep(0.05)

    await store.cache.put("a", b"2", lifetime_s=LONG_S, limit=LARGE)
    assert await store.cache.get("a") == b"2"


LAYOUT = Layout("tt")
SAME = [name for name in map(str, range(200)) if LAYOUT.bucket(name) is LAYOUT.buckets[0]]  # names of one bucket


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(SAME[:5]), st.integers(0, 60)), max_size=25),
    st.integers(HEAD, 200),
)
async def test_the_newest_values_within_the_limit_are_kept(server, puts, share):
    """The values' sizes are counted; a value that replaces another one is the newest."""
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    expected: OrderedDict[str, bytes] = OrderedDict()
    for number, (name, size) in enumerate(puts):
        value = bytes([number]) * size
        await store.cache.put(name, value, lifetime_s=LONG_S + number, limit=share * len(LAYOUT.buckets))
        expected.pop(name, None)
        if HEAD + size <= share:
            expected[name] = value
        while sum(HEAD + len(kept) for kept in expected.values()) > share:
            expected.popitem(last=False)
    kept = {name: await store.cache.get(name) for name in SAME[:5]}
    keys = store.layout.buckets[0].cache
    (counted,) = await store._servers.execute(keys[2], [("GET", keys[2])])
    await store.close()

    assert {name: value for name, value in kept.items() if value is not None} == dict(expected)
    assert sum(HEAD + len(value) for value in expected.values()) == int(counted or 0)


async def test_all_keys_of_the_cache_expire(store):
    """They are in one slot of a cluster."""
    await store.cache.put("a", b"1", lifetime_s=LONG_S, limit=LARGE)
    for key in store.layout.bucket("a").cache:
        (left_s,) = await store._servers.execute(key, [("TTL", key)])
        assert LONG_S - 60 < left_s <= LONG_S
