"""What servers say of themselves."""

from dataclasses import replace

import pytest

from storage.errors import StorageError
from storage.redis.server_info import ServerInfo, check_supported, summarize

GOOD = ServerInfo("here:1", "redis", "7.0.15", (7, 0), {})


def facts(**said):
    return ServerInfo("here:1", "valkey", "9.1.2", (7, 2), {"aof_enabled": "1"} | said)


def test_an_old_server_is_refused():
    """A server older than Redis 7 is refused, saying what is needed."""
    check_supported(GOOD, in_cluster=False)
    with pytest.raises(StorageError, match=r"here:1 is redis 6.2.6; TokenTape needs Redis 7 or Valkey 8"):
        check_supported(ServerInfo("here:1", "redis", "6.2.6", (6, 2), {}), in_cluster=False)


def test_a_server_that_would_throw_rollouts_away_is_warned_of():
    """What loses rollouts silently is doubted, each with what to do: eviction, no append-only file, one that fails."""
    assert [] == facts().warnings
    assert [] == facts(maxmemory="100", maxmemory_policy="noeviction").warnings
    assert [] == facts(maxmemory="0", maxmemory_policy="allkeys-lru").warnings
    for said, seen, mend in (
        ({"maxmemory": "9", "maxmemory_policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru", "noeviction"),
        ({"aof_enabled": "0"}, "no append-only file", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "cannot write", "disk"),
        ({"role": "slave", "master_host": "db1", "master_port": "6379"}, "replica", "db1:6379"),
    ):
        (warning,) = facts(**said).warnings
        assert warning.can_lose_data
        assert seen in warning.problem
        assert mend in warning.fix


def test_a_file_that_the_system_writes_when_it_likes_is_worth_a_note():
    """appendfsync no is no fault; of our own server, on a socket, it is our own doing."""
    (warning,) = facts(appendfsync="no").warnings

    assert not warning.can_lose_data
    assert [] == replace(facts(appendfsync="no"), where="/tmp/store/valkey.sock").warnings


def test_a_file_is_written_if_its_last_write_and_rewrite_went_well():
    """A disk that is full shows here before a snapshot is missed."""
    assert facts().writes_file
    assert not facts(aof_enabled="0").writes_file
    assert not facts(aof_last_write_status="err").writes_file
    assert not facts(aof_last_bgrewrite_status="err").writes_file


def test_the_bound_of_all_servers_is_none_if_one_has_none():
    """Its share could not be told from a sum."""
    bounded, free = facts(maxmemory="100", used_memory="30"), facts(used_memory="5")

    assert ("60", "200") == (summarize([bounded] * 2)["memory_bytes"], summarize([bounded] * 2)["memory_limit_bytes"])
    assert ("35", "0") == (summarize([bounded, free])["memory_bytes"], summarize([bounded, free])["memory_limit_bytes"])
    assert ("1", "0") == tuple(summarize([bounded, one])["aof_ok"] for one in (free, facts(aof_enabled="0")))


async def test_facts_are_those_of_the_server(on_redis):
    """`facts` tells name, version and address of a real server, and warns of what it is set to."""
    said = await on_redis.info()

    assert said["version"].startswith("redis 7")
    assert said["servers"].startswith("127.0.0.1:")
    assert int(said["memory_bytes"]) > 0
    assert "no append-only file" in str(await on_redis.warnings())
