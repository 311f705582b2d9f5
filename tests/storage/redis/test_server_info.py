"""INFO: supported versions, warnings, and the summary for operators."""

import os
import signal
from dataclasses import replace
from unittest.mock import Mock

import pytest
import redis

from storage.errors import StorageError, StoreUnreachable
from storage.redis.connections import Barrier
from storage.redis.server_info import ServerInfo, check_supported, summarize, warnings_of
from storage.types import Reservation, StepWrite

GOOD = ServerInfo("here:1", "redis", "7.0.15", (7, 0), {})


def info(**fields):
    return ServerInfo("here:1", "valkey", "9.1.2", (7, 2), {"aof_enabled": "1"} | fields)


def test_an_unsupported_version_is_refused():
    """A server older than Redis 7 is refused; the error has the required version."""
    check_supported(GOOD, in_cluster=False)
    with pytest.raises(StorageError, match=r"here:1 is redis 6.2.6; TokenTape requires Redis 7 or Valkey 8"):
        check_supported(ServerInfo("here:1", "redis", "6.2.6", (6, 2), {}), in_cluster=False)


def test_settings_that_can_lose_data_are_warnings():
    """Eviction, no append-only file, a failed write of it: each has a fix."""
    assert info().warnings == []
    assert info(maxmemory="100", maxmemory_policy="noeviction").warnings == []
    assert info(maxmemory="0", maxmemory_policy="allkeys-lru").warnings == []
    for fields, problem, fix in (
        ({"maxmemory": "9", "maxmemory_policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru", "noeviction"),
        ({"aof_enabled": "0"}, "no append-only file", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "cannot write", "disk"),
    ):
        (warning,) = info(**fields).warnings
        assert warning.can_lose_data
        assert problem in warning.problem
        assert fix in warning.fix


def test_appendfsync_no_is_a_warning_without_data_loss():
    """The embedded server, on a Unix socket, is fsynced by TokenTape and has no warning."""
    (warning,) = info(appendfsync="no").warnings

    assert not warning.can_lose_data
    assert replace(info(appendfsync="no"), address="/tmp/store/valkey.sock").warnings == []


def test_the_append_only_file_is_ok_if_its_last_write_and_rewrite_succeeded():
    """A full disk shows here before a snapshot fails."""
    assert info().is_aof_ok
    assert not info(aof_enabled="0").is_aof_ok
    assert not info(aof_last_write_status="err").is_aof_ok
    assert not info(aof_last_bgrewrite_status="err").is_aof_ok


def test_the_memory_limit_is_0_if_one_server_has_none():
    """A sum would not show that one server has no limit."""
    limited, unlimited = info(maxmemory="100", used_memory="30"), info(used_memory="5")

    def facts(*servers):
        return summarize(dict(enumerate(servers)), {})

    assert (facts(limited, limited)["memory_bytes"], facts(limited, limited)["memory_limit_bytes"]) == ("60", "200")
    assert (facts(limited, unlimited)["memory_bytes"], facts(limited, unlimited)["memory_limit_bytes"]) == ("35", "0")
    assert tuple(facts(limited, server)["aof_ok"] for server in (unlimited, info(aof_enabled="0"))) == ("1", "0")


def test_the_memory_share_is_that_of_the_fullest_server():
    """A sum would not show a server with more data than the others; one without a limit has no share."""
    servers = [info(maxmemory="100", used_memory=used) for used in ("10", "90", "20")]

    assert [
        summarize(dict(enumerate(found)), {})["memory_share"]
        for found in (servers, [*servers, info(used_memory="500")], [info(used_memory="500")])
    ] == ["0.9", "0.9", "0"]


def test_servers_with_different_policies_are_a_warning():
    """Each may be right, but not both: one evicts rollouts that the others keep."""
    servers = [info(maxmemory_policy="noeviction"), info(maxmemory_policy="allkeys-lru")]
    named = {Mock(address=f"db{number}:1"): server for number, server in enumerate(servers)}

    (warning,) = warnings_of(named, {})

    assert "different settings of maxmemory-policy: db0:1 noeviction, db1:1 allkeys-lru" in warning.problem


def test_a_cluster_that_requires_all_slots_is_a_warning():
    """One dead server would stop the rollouts of all others."""
    fields = {"cluster_enabled": "1", "cluster-require-full-coverage": "yes"}
    (warning,) = info(**fields).warnings

    assert not warning.can_lose_data
    assert "set cluster-require-full-coverage no" in warning.fix


async def test_info_of_a_real_server(on_redis):
    """`info` has name, version and address of the server, and `warnings` its problems."""
    summary = await on_redis.info()

    assert summary["version"].startswith("redis 7")
    assert summary["servers"].startswith("127.0.0.1:")
    assert int(summary["memory_bytes"]) > 0
    assert "no append-only file" in str(await on_redis.warnings())


async def appended(store, name="s", now_ms=2):
    """Append a record to a rollout and return its position."""
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    return (await store.append(StepWrite("r", incarnation, name, b"1"), now_ms=now_ms)).position


async def test_acknowledged_waits_for_the_reply_only(on_redis):
    """By default a write is complete with the reply of the server: no further command is sent."""
    assert Barrier() == on_redis._barrier
    assert await appended(on_redis) == 0


async def test_writes_are_confirmed_by_a_ping_with_appendfsync_no(tmp_path, start, opened):
    """A server that writes its file before it replies, without fsync, confirms each write by a PING."""
    for url in (f"embedded:{tmp_path / 'store'}", start("--appendonly", "yes", "--appendfsync", "no").url):
        store = await opened(url)
        assert Barrier(confirmed=True) == store._barrier
        assert await appended(store) == 0

    store = await opened(start("--appendonly", "yes", "--appendfsync", "everysec").url)
    assert Barrier() == store._barrier


async def test_opening_is_confirmed_if_the_rollout_is_new_or_gets_a_reservation(start, opened):
    """Otherwise nothing is written that an append does not confirm."""
    server = start("--appendonly", "yes", "--appendfsync", "no")
    store = await opened(server.url)

    async def pings(name, **options):
        before = _calls_of(server, "ping")
        await store.open(name, {"places": b"2"} if name == "limited" else {}, now_ms=1, **options)
        return _calls_of(server, "ping") - before

    assert [await pings("r"), await pings("r")] == [1, 0]
    assert [
        await pings("limited"),
        await pings("limited", reservation=Reservation("s", 60_000)),
        await pings("limited"),
    ] == [1, 1, 0]


def _calls_of(server, command):
    """The number of calls of a command at a server."""
    with redis.Redis.from_url(server.url) as client:
        return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


async def test_fsync_sets_appendfsync_always_on_the_embedded_server(tmp_path, opened, command):
    """With durability fsync, the embedded server replies after its file is on disk."""
    store = await opened(f"embedded:{tmp_path / 'store'}", durability="fsync")

    assert await appended(store) == 0
    assert await command(store, "CONFIG", "GET", "appendfsync") == [[b"appendfsync", b"always"]]


async def test_fsync_sends_waitaof_with_appendfsync_everysec(start, opened):
    """With durability fsync, each write waits on its connection until the server has fsynced it."""
    server = start("--appendonly", "yes", "--appendfsync", "everysec")
    store = await opened(server.url, durability="fsync")

    assert await appended(store) == 0
    with server.client as client:
        writes = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        waits = client.info("commandstats")["cmdstat_waitaof"]["calls"]
        assert waits == writes + 3  # two EVALs after NOSCRIPT, and the creation of the store


async def test_fsync_requires_an_append_only_file(start, opened):
    """A server without one is refused; the error names the setting."""
    server = start()

    with pytest.raises(StorageError, match=f"set appendonly yes on {server.address}"):
        await opened(server.url, durability="fsync")


async def test_fsync_without_waitaof_requires_appendfsync_always(start_redis, opened):
    """WAITAOF exists since Redis 7.2."""
    server = start_redis("--appendonly", "yes")
    with server.client as client:
        if not client.info("server")["redis_version"].startswith("7.0."):
            pytest.skip("this redis-server has WAITAOF")
        with pytest.raises(StorageError, match=r"fsync requires Redis 7\.2 or newer, or appendfsync always"):
            await opened(server.url, durability="fsync")
        client.config_set("appendfsync", "always")

    store = await opened(server.url, durability="fsync")

    assert await appended(store) == 0


@pytest.fixture
async def replicated(start, opened, until):
    """Return a primary, its replica, and a store with durability replicated."""
    primary = start("--repl-diskless-sync-delay", "0")
    replica = start("--replicaof", "127.0.0.1", str(primary.port))
    store = await opened(primary.url, durability="replicated", timeout_s=2)
    with replica.client as client:

        async def is_linked():
            return client.info("replication")["master_link_status"] == "up"

        await until(is_linked)
    return primary, replica, store


async def test_replicated_waits_for_the_replica(replicated):
    """With durability replicated, a complete write is on the replica."""
    _, replica, store = replicated

    await appended(store)

    with replica.client as client:
        assert sum(b":records:r" in key for key in client.scan_iter()) == 1


async def test_a_write_without_its_replica_is_an_error(replicated):
    """A write without confirmation raises `StoreUnreachable`, also when it is repeated, until it is confirmed."""
    _, replica, store = replicated
    await appended(store, "s0")
    entry = StepWrite("r", (await store.get("r")).incarnation, "s1", b"1")
    os.kill(replica.process.pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(
                StoreUnreachable, match=r"reached 0 of 1 replicas \(store.replicas: 1\) before the timeout; retry"
            ):
                await store.append(entry, now_ms=2)
    finally:
        os.kill(replica.process.pid, signal.SIGCONT)

    assert (await store.append(entry, now_ms=3)).position == 1
    assert await store.read("r", 0, 9) == [b"1", b"1"]


async def test_the_address_of_a_replica_is_refused(replicated, opened):
    """The error has the address of its primary; it is worth a retry, as the replica may become the primary."""
    primary, replica, _ = replicated

    with pytest.raises(StoreUnreachable, match=rf"{replica.address} in store.url is a replica, .* {primary.address}"):
        await opened(replica.url)


async def test_a_server_that_becomes_a_replica_refuses_writes_until_it_is_the_primary(replicated):
    """The error is that of the server; each try is made on a new connection, as the name may have another address then."""
    primary, replica, store = replicated
    await appended(store)
    replica.send("REPLICAOF", "NO", "ONE")
    primary.send("REPLICAOF", "127.0.0.1", replica.port)

    with pytest.raises(StoreUnreachable, match="READONLY") as failure:
        await store.open("r", {}, now_ms=1)
    primary.send("REPLICAOF", "NO", "ONE")
    replica.send("REPLICAOF", "127.0.0.1", primary.port)

    assert primary.address == failure.value.server
    assert not (await store.open("r", {}, now_ms=1)).created


async def test_replicated_in_a_cluster_waits_on_the_server_of_the_write(url_of, opened):
    """A write without replicas raises `StoreUnreachable`."""
    url = url_of("cluster")
    with pytest.raises(StoreUnreachable, match="reached 0 of 1 replicas"):
        await opened(url, durability="replicated", timeout_s=2)
    store = await opened(url, durability="replicated", timeout_s=2)

    with pytest.raises(StoreUnreachable, match="reached 0 of 1 replicas"):
        await appended(store)


async def test_an_embedded_store_has_no_replicas(tmp_path, opened):
    """Durability replicated is refused for an embedded store."""
    with pytest.raises(ValueError, match="no replicas"):
        await opened(f"embedded:{tmp_path / 'store'}", durability="replicated")
