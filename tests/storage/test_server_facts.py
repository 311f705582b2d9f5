"""What servers say of themselves."""

import pytest

from storage.server_facts import ServerFacts, check_facts
from storage.store import StorageError

GOOD = ServerFacts("here:1", "redis", "7.0.15", (7, 0), {})


def facts(**said):
    return ServerFacts("here:1", "valkey", "9.1.2", (7, 2), {"aof_enabled": "1"} | said)


def test_an_old_server_is_refused():
    """A server older than Redis 7 is refused, saying what is needed."""
    check_facts(GOOD, in_cluster=False)
    with pytest.raises(StorageError, match=r"here:1 is redis 6.2.6; TokenTape needs Redis 7 or Valkey 8"):
        check_facts(ServerFacts("here:1", "redis", "6.2.6", (6, 2), {}), in_cluster=False)


def test_a_server_that_would_throw_rollouts_away_is_warned_of():
    """What loses rollouts silently is said: eviction, and no append-only file."""
    assert [] == facts().warnings
    assert [] == facts(maxmemory="100", maxmemory_policy="noeviction").warnings
    assert [] == facts(maxmemory="0", maxmemory_policy="allkeys-lru").warnings
    assert "maxmemory-policy allkeys-lru" in str(facts(maxmemory="9", maxmemory_policy="allkeys-lru").warnings)
    assert "no append-only file" in str(facts(aof_enabled="0").warnings)


async def test_facts_are_those_of_the_server(on_redis):
    """`facts` tells name, version and address of a real server, and warns of what it is set to."""
    said = await on_redis.facts()

    assert said["version"].startswith("redis 7")
    assert said["servers"].startswith("127.0.0.1:")
    assert int(said["memory_bytes"]) > 0
    assert "no append-only file" in said["warnings"]
