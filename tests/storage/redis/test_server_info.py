"""INFO: supported versions, warnings, and the summary for operators."""

from dataclasses import replace

import pytest

from storage.errors import StorageError
from storage.redis.server_info import ServerInfo, check_supported, summarize

GOOD = ServerInfo("here:1", "redis", "7.0.15", (7, 0), {})


def info(**fields):
    return ServerInfo("here:1", "valkey", "9.1.2", (7, 2), {"aof_enabled": "1"} | fields)


def test_an_unsupported_version_is_refused():
    """A server older than Redis 7 is refused; the error has the required version."""
    check_supported(GOOD, in_cluster=False)
    with pytest.raises(StorageError, match=r"here:1 is redis 6.2.6; TokenTape requires Redis 7 or Valkey 8"):
        check_supported(ServerInfo("here:1", "redis", "6.2.6", (6, 2), {}), in_cluster=False)


def test_settings_that_can_lose_data_are_warnings():
    """Eviction, no append-only file, a failed write of it, a replica: each has a fix."""
    assert [] == info().warnings
    assert [] == info(maxmemory="100", maxmemory_policy="noeviction").warnings
    assert [] == info(maxmemory="0", maxmemory_policy="allkeys-lru").warnings
    for fields, problem, fix in (
        ({"maxmemory": "9", "maxmemory_policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru", "noeviction"),
        ({"aof_enabled": "0"}, "no append-only file", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "cannot write", "disk"),
        ({"role": "slave", "master_host": "db1", "master_port": "6379"}, "replica", "db1:6379"),
    ):
        (warning,) = info(**fields).warnings
        assert warning.can_lose_data
        assert problem in warning.problem
        assert fix in warning.fix


def test_appendfsync_no_is_a_warning_without_data_loss():
    """The embedded server, on a Unix socket, is fsynced by TokenTape and has no warning."""
    (warning,) = info(appendfsync="no").warnings

    assert not warning.can_lose_data
    assert [] == replace(info(appendfsync="no"), address="/tmp/store/valkey.sock").warnings


def test_the_append_only_file_is_ok_if_its_last_write_and_rewrite_succeeded():
    """A full disk shows here before a snapshot fails."""
    assert info().is_aof_ok
    assert not info(aof_enabled="0").is_aof_ok
    assert not info(aof_last_write_status="err").is_aof_ok
    assert not info(aof_last_bgrewrite_status="err").is_aof_ok


def test_the_memory_limit_is_0_if_one_server_has_none():
    """A sum would not show that one server has no limit."""
    limited, unlimited = info(maxmemory="100", used_memory="30"), info(used_memory="5")

    assert ("60", "200") == (summarize([limited] * 2)["memory_bytes"], summarize([limited] * 2)["memory_limit_bytes"])
    assert ("35", "0") == (
        summarize([limited, unlimited])["memory_bytes"],
        summarize([limited, unlimited])["memory_limit_bytes"],
    )
    assert ("1", "0") == tuple(summarize([limited, server])["aof_ok"] for server in (unlimited, info(aof_enabled="0")))


async def test_info_of_a_real_server(on_redis):
    """`info` has name, version and address of the server, and `warnings` its problems."""
    summary = await on_redis.info()

    assert summary["version"].startswith("redis 7")
    assert summary["servers"].startswith("127.0.0.1:")
    assert int(summary["memory_bytes"]) > 0
    assert "no append-only file" in str(await on_redis.warnings())
