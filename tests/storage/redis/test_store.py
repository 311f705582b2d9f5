"""RedisStore: lifetimes, lost responses, paging, prefixes."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.redis.keys import rollout_keys
from storage.types import StepWrite


@pytest.fixture(params=["redis", "cluster"])
async def mortal(request, url_of, opened):
    """Return an empty store whose rollouts expire."""
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
        return 0 == await key_count(store)

    await until(is_empty)

    assert None is await store.get("r")
    assert () == (await store.list()).names
    with pytest.raises(Exception, match="expired"):
        await store.append(StepWrite("r", incarnation, "s2", b"2"), now_ms=4)
    assert await is_empty()


async def test_every_write_restarts_all_lifetimes(mortal):
    """Each write sets the expiry of all keys of the rollout, and of its member of the listing."""
    incarnation = await filled(mortal)
    keys = rollout_keys("tt", "r").all
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
    keys = rollout_keys("tt", "r").all
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

    assert ("other",) == (await mortal.list()).names
    assert 0 == await on_key(mortal, "ZCOUNT", keys.expiry, "-inf", 1_000)


async def test_writes_remove_expired_members(mortal):
    """Expired members are removed by writes, even if the listing is never read."""
    keys = await with_an_expired_one(mortal)

    await mortal.update_if("other", {}, expect={}, now_ms=2)

    assert 1 == await on_key(mortal, "ZCARD", keys.listing)
    assert 1 == await on_key(mortal, "ZCARD", keys.expiry)


async def with_an_expired_one(store):
    """Create a rollout in a bucket in which another one has expired; return its keys."""
    keys = rollout_keys("tt", "other")
    expired = next(name for name in map(str, range(1000)) if rollout_keys("tt", name).listing == keys.listing)
    await filled(store, "other")
    await filled(store, expired)
    expired_keys = rollout_keys("tt", expired)
    for key in expired_keys.all[:5]:
        await on_key(store, "DEL", key)
    await on_key(store, "ZADD", keys.expiry, 1_000, b"000000000000001" + expired_keys.encoded)
    assert 2 == await on_key(store, "ZCARD", keys.listing)
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

    assert 3 == calls
    assert made.created
    assert 0 == index
    assert [b"1"] == await on_redis.read("r", 0, 9)
    assert {"steps": 1} == (await on_redis.get("r")).counts


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
    assert () == (await other.list()).names
    assert not await other.delete("r")
    assert b"theirs" == await other.set_once("c", b"theirs")
    assert b"ours" == await on_redis.set_once("c", b"ours")
