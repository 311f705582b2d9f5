"""The store over the Redis protocol: lifetimes, and answers that got lost."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.redis.keys import rollout_keys
from storage.types import StepWrite


@pytest.fixture(params=["redis", "cluster"])
async def mortal(request, url_of, opened):
    """An empty store whose rollouts expire."""
    return await opened(url_of(request.param), ttl_s=100)


async def filled(store, name="r"):
    """The incarnation of a rollout that has every kind of key."""
    incarnation = (await store.open(name, {"a": b"1"}, now_ms=1)).incarnation
    await store.append(StepWrite(name, incarnation, "s1", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2)
    await store.mark(name, incarnation, {"m": b"1"}, now_ms=3)
    return incarnation


async def on_key(store, verb, key, *more):
    (reply,) = await store._servers.ask(key, [(verb, key, *more)])
    return reply


@pytest.mark.parametrize("kind", ["embedded", "redis", "cluster"])
async def test_an_idle_rollout_expires_and_leaves_no_key(url_of, opened, key_count, until, kind):
    """With a ttl, a rollout that nothing is written to vanishes, and leaves no key behind."""
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


async def test_every_write_renews_all_lifetimes(mortal):
    """Each write to a rollout sets the expiry of all its keys, and of its place in the listing, anew."""
    incarnation = await filled(mortal)
    keys = rollout_keys("tt", "r").all()
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


async def test_reading_renews_nothing(mortal):
    """Looking at a rollout does not keep it alive."""
    await filled(mortal)
    keys = rollout_keys("tt", "r").all()
    for key in keys:
        await on_key(mortal, "PEXPIRE", key, 5_000)

    await mortal.get("r")
    await mortal.read("r", 0, 9)
    await mortal.marks("r")
    await mortal.find("r", "s1")
    await mortal.list()

    assert all([await on_key(mortal, "PTTL", key) <= 5_000 for key in keys])


async def test_without_a_ttl_nothing_expires(on_redis, command):
    """By default no key has an expiry."""
    await filled(on_redis)

    (info,) = await command(on_redis, "INFO", "keyspace")
    assert b"expires=0" in info


async def test_the_dead_are_not_listed_among_the_living(mortal):
    """A rollout that expired is in no listing, though others of its bucket live on."""
    keys = await with_a_dead_one(mortal)

    assert ("living",) == (await mortal.list()).names
    assert 0 == await on_key(mortal, "ZCOUNT", keys.expiry, "-inf", 1_000)


async def test_writes_clear_the_dead_away(mortal):
    """Nobody needs to list for the dead to be taken out of the listing: every write takes some."""
    keys = await with_a_dead_one(mortal)

    await mortal.update_if("living", {}, expect={}, now_ms=2)

    assert 1 == await on_key(mortal, "ZCARD", keys.listing)
    assert 1 == await on_key(mortal, "ZCARD", keys.expiry)


async def with_a_dead_one(store):
    """The keys of a living rollout in whose bucket another died."""
    keys = rollout_keys("tt", "living")
    dead = next(name for name in map(str, range(1000)) if rollout_keys("tt", name).listing == keys.listing)
    await filled(store, "living")
    await filled(store, dead)
    dead_keys = rollout_keys("tt", dead)
    for key in dead_keys.all()[:5]:
        await on_key(store, "DEL", key)
    await on_key(store, "ZADD", keys.expiry, 1_000, b"000000000000001" + dead_keys.encoded)
    assert 2 == await on_key(store, "ZCARD", keys.listing)
    return keys


async def test_a_lost_answer_does_no_harm(on_redis):
    """A round trip that is made twice because its answer was lost leaves what one would have left."""
    ask, lost = on_redis._servers.ask, 0

    async def ask_twice(key, commands, **how):
        nonlocal lost
        lost += 1
        await ask(key, commands, **how)
        return await ask(key, commands, **how)

    on_redis._servers.ask = ask_twice
    made = await on_redis.open("r", {"a": b"1"}, now_ms=1)
    index, *_ = await on_redis.append(
        StepWrite("r", made.incarnation, "s", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2
    )
    await on_redis.mark("r", made.incarnation, {"m": b"1"}, now_ms=3)

    assert 3 == lost
    assert made.created
    assert 0 == index
    assert [b"1"] == await on_redis.read("r", 0, 9)
    assert {"steps": 1} == (await on_redis.get("r")).counts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text(min_size=1, max_size=20), st.integers(0, 50), max_size=25),
    st.integers(1, 8),
    st.integers(0, 50),
)
async def test_listing_is_a_sorted_window(on_redis, command, rollouts, limit, since_ms):
    """Whatever was opened when, paging from a time on gives exactly that, newest first."""
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


async def test_stores_of_different_prefixes_do_not_meet(url_of, opened, on_redis):
    """Two stores on one server whose prefixes differ know nothing of each other."""
    other = await opened(url_of("redis"), prefix="tt:other")
    await filled(on_redis)

    assert None is await other.get("r")
    assert () == (await other.list()).names
    assert not await other.delete("r")
    assert b"theirs" == await other.set_once("c", b"theirs")
    assert b"ours" == await on_redis.set_once("c", b"ours")
