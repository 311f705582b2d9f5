"""Scripts: one round trip each, on servers that have not seen them too."""

import pytest

from storage.store import Entry, StoreAway


class Counted:
    """Servers, and how often they were asked."""

    def __init__(self, servers):
        self.servers = servers
        self.asked = 0

    async def ask(self, key, commands, **how):
        self.asked += 1
        return await self.servers.ask(key, commands, **how)

    def __getattr__(self, name):
        return getattr(self.servers, name)


@pytest.mark.parametrize("kind", ["redis", "cluster"])
async def test_open_and_append_take_one_round_trip(url_of, opened, command, kind):
    """A rollout is opened, and a record stored with all that belongs to it, in one round trip each."""
    store = await opened(url_of(kind), ttl_s=60)
    await command(store, "SCRIPT", "FLUSH")
    store._servers = counted = Counted(store._servers)

    birth = (await store.open("r", {"a": b"1"}, now_ms=1)).birth
    await store.append(Entry("r", birth, "s1", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2)

    assert 4 == counted.asked  # each was told its script first

    await store.open("r", {"a": b"1"}, now_ms=1)
    await store.append(Entry("r", birth, "s2", b"2", {b"c": b"1"}, (b"b",), {"steps": 1}), now_ms=3)

    assert 6 == counted.asked


async def test_a_server_that_forgot_a_script_is_told_again(on_redis, command):
    """A restarted server, which knows no script, makes no verb fail."""
    birth = (await on_redis.open("r", {}, now_ms=1)).birth
    await command(on_redis, "SCRIPT", "FLUSH")

    assert 0 == (await on_redis.append(Entry("r", birth, "s", b"1"), now_ms=2)).position
    assert (0, b"1") == await on_redis.find("r", "s")


async def test_a_full_server_writes_nothing(on_redis, command):
    """When the server's memory is full, an append raises `StoreAway` and has written nothing at all."""
    birth = (await on_redis.open("r", {}, now_ms=1)).birth
    entry = Entry("r", birth, "s", b"1", {b"b": b"1"}, (), {"steps": 1})
    before = await on_redis.look("r")
    await command(on_redis, "CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreAway, match="OOM"):
            await on_redis.append(entry, now_ms=2)
        assert before == await on_redis.look("r")
        assert "maxmemory-policy" not in str(await on_redis.doubts())
    finally:
        await command(on_redis, "CONFIG", "SET", "maxmemory", 0)

    assert {} == await on_redis.blocks("r")
    assert 0 == (await on_redis.append(entry, now_ms=3)).position
