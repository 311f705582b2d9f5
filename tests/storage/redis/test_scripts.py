"""Lua scripts: one round trip, caching, and the files they are loaded from."""

from hashlib import sha1
from pathlib import Path

import pytest

from storage.errors import StoreUnreachable
from storage.redis import scripts
from storage.types import LATE_MARK, MAX_LEASE_MS, StepWrite

LUA = Path(scripts.__file__).with_name("lua")
LOADED = {name: script for name, script in vars(scripts).items() if isinstance(script, scripts.Script)}


class CountingServers:
    """Servers with a count of their round trips."""

    def __init__(self, servers):
        self.servers = servers
        self.round_trips = 0

    async def execute(self, key, commands, **options):
        self.round_trips += 1
        return await self.servers.execute(key, commands, **options)

    def __getattr__(self, name):
        return getattr(self.servers, name)


@pytest.mark.parametrize("kind", ["redis", "cluster"])
async def test_open_and_append_take_one_round_trip(url_of, opened, command, kind):
    """`open` and `append` with all their data are one round trip each."""
    store = await opened(url_of(kind), ttl_s=60)
    await command(store, "SCRIPT", "FLUSH")
    store._servers = counted = CountingServers(store._servers)

    incarnation = (await store.open("r", {"a": b"1"}, now_ms=1)).incarnation
    await store.append(StepWrite("r", incarnation, "s1", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2)

    assert counted.round_trips == 4  # each script was loaded first

    await store.open("r", {"a": b"1"}, now_ms=1)
    await store.append(StepWrite("r", incarnation, "s2", b"2", {b"c": b"1"}, (b"b",), {"steps": 1}), now_ms=3)

    assert counted.round_trips == 6


async def test_a_script_is_loaded_again_after_a_restart(on_redis, command):
    """No method fails if the server has no cached scripts."""
    incarnation = (await on_redis.open("r", {}, now_ms=1)).incarnation
    await command(on_redis, "SCRIPT", "FLUSH")

    assert (await on_redis.append(StepWrite("r", incarnation, "s", b"1"), now_ms=2)).position == 0
    assert await on_redis.find("r", "s") == (0, b"1")


async def test_an_append_to_a_full_server_writes_nothing(on_redis, command):
    """If the memory of the server is full, an append raises `StoreUnreachable` and writes nothing."""
    incarnation = (await on_redis.open("r", {}, now_ms=1)).incarnation
    entry = StepWrite("r", incarnation, "s", b"1", {b"b": b"1"}, (), {"steps": 1})
    before = await on_redis.get("r")
    await command(on_redis, "CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreUnreachable, match="OOM"):
            await on_redis.append(entry, now_ms=2)
        assert before == await on_redis.get("r")
        assert "maxmemory-policy" not in str(await on_redis.warnings())
    finally:
        await command(on_redis, "CONFIG", "SET", "maxmemory", 0)

    assert await on_redis.blocks("r") == {}
    assert (await on_redis.append(entry, now_ms=3)).position == 0


def test_evalsha_has_the_sha1_of_the_text_of_eval():
    """The text has no comments and the same newlines on all systems, so the SHA1 is stable."""
    for script in LOADED.values():
        _, text, *rest = script.as_eval(("EVALSHA", script.sha, 1, b"key", "argument"))

        assert sha1(text.encode()).hexdigest() == script.sha
        assert rest == [1, b"key", "argument"]
        assert text.isascii()
        assert "\r" not in text
        assert not any(line.startswith("--") for line in text.splitlines())


def test_each_lua_file_is_part_of_a_script():
    """Each file starts with a comment, and its code is in a script."""
    texts = [script.as_eval(("EVALSHA", script.sha, 0))[1] for script in LOADED.values()]
    for file in LUA.iterdir():
        lines = file.read_text().splitlines()
        code = "\n".join(line for line in lines if not line.startswith("--"))

        assert lines[0].startswith("-- "), file
        assert any(code in text for text in texts), file


def test_constants_in_lua_are_those_in_python():
    """The maximum lease and the prefix of late marks are in both."""
    assert f"local MAX_LEASE_MS = {MAX_LEASE_MS}\n" in (LUA / "queue_pending.lua").read_text()
    assert f"'{LATE_MARK}' .. ARGV[5]" in (LUA / "append.lua").read_text()
