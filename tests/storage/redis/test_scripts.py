"""Scripts: one round trip each, on servers that have not seen them too."""

from hashlib import sha1
from pathlib import Path

import pytest

from storage.errors import StoreUnreachable
from storage.redis import scripts
from storage.types import LATE_MARK, MAX_LEASE_MS, StepWrite

LUA = Path(scripts.__file__).with_name("lua")
LOADED = {name: script for name, script in vars(scripts).items() if isinstance(script, scripts.Script)}


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

    incarnation = (await store.open("r", {"a": b"1"}, now_ms=1)).incarnation
    await store.append(StepWrite("r", incarnation, "s1", b"1", {b"b": b"1"}, (), {"steps": 1}), now_ms=2)

    assert 4 == counted.asked  # each was told its script first

    await store.open("r", {"a": b"1"}, now_ms=1)
    await store.append(StepWrite("r", incarnation, "s2", b"2", {b"c": b"1"}, (b"b",), {"steps": 1}), now_ms=3)

    assert 6 == counted.asked


async def test_a_server_that_forgot_a_script_is_told_again(on_redis, command):
    """A restarted server, which knows no script, makes no verb fail."""
    incarnation = (await on_redis.open("r", {}, now_ms=1)).incarnation
    await command(on_redis, "SCRIPT", "FLUSH")

    assert 0 == (await on_redis.append(StepWrite("r", incarnation, "s", b"1"), now_ms=2)).position
    assert (0, b"1") == await on_redis.find("r", "s")


async def test_a_full_server_writes_nothing(on_redis, command):
    """When the server's memory is full, an append raises `StoreUnreachable` and has written nothing at all."""
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

    assert {} == await on_redis.blocks("r")
    assert 0 == (await on_redis.append(entry, now_ms=3)).position


def test_a_script_is_sent_by_the_sha_of_its_text():
    """The server computes the same SHA1 from the text of EVAL; text and SHA do not depend on comments or the system."""
    for script in LOADED.values():
        _, sha, *_ = called = script.call([b"key"], ["argument"])
        _, text, *rest = script.teach(called)

        assert sha1(text.encode()).hexdigest() == sha
        assert [1, b"key", "argument"] == rest
        assert text.isascii()
        assert "\r" not in text
        assert not any(line.startswith("--") for line in text.splitlines())


def test_each_lua_file_is_part_of_a_script():
    """No file is left out, and each begins with its reason."""
    texts = [script.teach(script.call([], []))[1] for script in LOADED.values()]
    for file in LUA.iterdir():
        lines = file.read_text().splitlines()
        code = "\n".join(line for line in lines if not line.startswith("--"))

        assert lines[0].startswith("-- "), file
        assert any(code in text for text in texts), file


def test_constants_of_the_scripts_are_those_of_the_code():
    """The longest lease and the mark of a late record are written in Lua as well."""
    assert f"local LONGEST = {MAX_LEASE_MS}\n" in (LUA / "queue_pending.lua").read_text()
    assert f"'{LATE_MARK}' .. ARGV[5]" in (LUA / "append.lua").read_text()
