"""The guarantees of `Cache`, tested on every kind of server."""

import asyncio
from collections import OrderedDict
from secrets import token_hex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import StoreOptions, open_store
from storage.redis.keys import BUCKETS, bucket_for, cache_keys

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
    assert b"2" == await store.cache.get("a")


SAME = [name for name in map(str, range(200)) if bucket_for(name) == BUCKETS[0]]  # names of one bucket


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(SAME[:5]), st.integers(0, 60)), max_size=25),
    st.integers(HEAD, 200),
)
async def test_the_newest_values_within_the_limit_are_kept(server, puts, share):
    """The size that is counted is that of the values; a value that replaces another one is the newest."""
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    expected: OrderedDict[str, bytes] = OrderedDict()
    for number, (name, size) in enumerate(puts):
        value = bytes([number]) * size
        await store.cache.put(name, value, lifetime_s=LONG_S + number, limit=share * len(BUCKETS))
        expected.pop(name, None)
        if HEAD + size <= share:
            expected[name] = value
        while sum(HEAD + len(kept) for kept in expected.values()) > share:
            expected.popitem(last=False)
    kept = {name: await store.cache.get(name) for name in SAME[:5]}
    keys = cache_keys(store._prefix, BUCKETS[0])
    (counted,) = await store._servers.execute(keys[2], [("GET", keys[2])])
    await store.close()

    assert dict(expected) == {name: value for name, value in kept.items() if value is not None}
    assert sum(HEAD + len(value) for value in expected.values()) == int(counted or 0)


async def test_all_keys_of_the_cache_expire(store):
    """They are in one slot of a cluster."""
    await store.cache.put("a", b"1", lifetime_s=LONG_S, limit=LARGE)
    for key in cache_keys(store._prefix, bucket_for("a")):
        (left_s,) = await store._servers.execute(key, [("TTL", key)])
        assert LONG_S - 60 < left_s <= LONG_S
