"""Opening of stores: the number of buckets is chosen when a store is created, and kept."""

import asyncio
from secrets import token_hex

import pytest
import redis

from storage import StoreOptions
from storage.errors import StorageError
from storage.types import StepWrite


@pytest.fixture
def url(server):
    return f"unix:{server.socket}"


@pytest.fixture
def client(server):
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield client


@pytest.mark.parametrize(("kind", "count"), [("redis", 16), ("cluster", 256)])
async def test_a_new_store_has_the_number_of_its_kind_of_server(url_of, opened, kind, count):
    """And keeps it when it is opened again."""
    url = url_of(kind)
    await opened(url)

    assert count == len((await opened(url, buckets=count)).layout.buckets)
    with pytest.raises(StorageError, match=rf"store.buckets is 32, .* was created with {count}: .*tokentape archive"):
        await opened(url, buckets=32)


@pytest.mark.parametrize("count", [16, 32, 256, 1024])
async def test_processes_that_create_a_store_at_once_agree(url, opened, count):
    """All that do not name another number have the one that it was created with."""
    prefix = token_hex(8)
    stores = await asyncio.gather(*(opened(url, prefix=prefix, buckets=count) for _ in range(4)))
    stores.append(await opened(url, prefix=prefix))

    assert {len(store.layout.buckets) for store in stores} == {count}
    assert len({await store.set_once("salt", token_hex(4).encode()) for store in stores}) == 1


async def test_processes_that_want_different_numbers_do_not_both_open(url, opened):
    """The first one creates the store."""
    prefix = token_hex(8)
    results = await asyncio.gather(
        *(opened(url, prefix=prefix, buckets=count) for count in (16, 256)), return_exceptions=True
    )

    assert sum(isinstance(result, StorageError) for result in results) == 1


async def test_a_store_of_0_1_0_has_sixteen_buckets(url, opened, client):
    """Its constants are a hash."""
    prefix = token_hex(8)
    client.hset(f"{prefix}:constants", "minting-secret", b"s")

    assert len((await opened(url, prefix=prefix)).layout.buckets) == 16
    with pytest.raises(StorageError, match=r"store.buckets is 256, .* was created with 16"):
        await opened(url, prefix=prefix, buckets=256)


async def test_0_1_0_cannot_start_on_a_store_with_another_number(url, opened, client):
    """The first command of a proxy of 0.1.0 fails."""
    store = await opened(url, prefix=token_hex(8), buckets=256)
    await store.set_once("minting-secret", b"ours")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.hsetnx(f"{store.layout.prefix}:constants", "minting-secret", b"theirs")
    assert await store.set_once("minting-secret", b"other") == b"ours"


@pytest.mark.parametrize("value", [b"", b"x", b"17", b"2048", b"9" * 5000])
async def test_a_key_that_is_none_of_ours_is_refused(url, opened, client, value):
    """Nothing is written."""
    prefix = token_hex(8)
    client.set(f"{prefix}:constants", value)

    with pytest.raises(StorageError, match=f"{prefix}:constants was not written by TokenTape"):
        await opened(url, prefix=prefix)
    assert value == client.get(f"{prefix}:constants")


@pytest.mark.parametrize("count", [0, 8, 17, 2048])
def test_a_number_that_no_store_can_have_is_refused(count):
    """A power of two from 16 to 1024."""
    with pytest.raises(ValueError, match="buckets must be a power of two from 16 to 1024"):
        StoreOptions(buckets=count)


@pytest.mark.parametrize("count", [32, 1024])
async def test_a_store_has_all_its_functions_with_any_number(url, opened, count):
    """Listing, timers, announcements, groups, queues, cache and changes."""
    store = await opened(url, prefix=token_hex(8), buckets=count)
    names = {f"r{number}" for number in range(100)}
    async with store.changes.subscribe() as changes:
        await asyncio.gather(*(store.open(name, {}, now_ms=1, timer_ms=5) for name in names))
        assert names == {(await anext(changes)).rollout for _ in names}
    opened_entity = await store.open("r1", {}, now_ms=2)
    await store.append(StepWrite("r1", opened_entity.incarnation, "s", b"1"), now_ms=2)
    announced = await store.announcements.announce("policy", b"1")
    await store.cache.put("c", b"1", lifetime_s=100, limit=2**20)
    await store.groups.open("g", {}, now_ms=1)
    await store.queue.enqueue("g", {"q": b"n"}, {}, expect={}, now_ms=1)
    (queued,) = (await store.queue.read("q", limit=5)).groups

    assert names == {name async for name in store.names()}
    assert names == {timer.rollout for timer in await store.timers.claim(100, now_ms=5, until_ms=9)}
    assert (await store.open("r99", {}, now_ms=2)).announcements == {"policy": announced}
    assert (queued.group, queued.note) == ("g", b"n")
    assert await store.queue.claim(queued, "h", {}, lease_ms=1000, now_ms=1)
    assert (await store.queue.counts("q"))[:2] == (0, 1)
    assert await store.cache.get("c") == b"1"
