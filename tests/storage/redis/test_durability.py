"""Durability: what a write waits for, and what is said when it waits in vain."""

import os
import signal

import pytest

from storage.errors import StorageError, StoreUnreachable
from storage.redis.durability import Barrier
from storage.types import StepWrite


async def appended(store, name="s", now_ms=2):
    """The index of a record appended to a rollout."""
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    return (await store.append(StepWrite("r", incarnation, name, b"1"), now_ms=now_ms)).position


async def test_acknowledged_waits_for_the_reply_only(on_redis):
    """By default a write is done when the server says so: nothing else is sent."""
    assert Barrier() == on_redis._barrier
    assert 0 == await appended(on_redis)


async def test_a_server_that_never_syncs_confirms_its_writes(tmp_path, start, opened):
    """Where a server writes its file before it replies and never syncs, each write is shown to be in the file."""
    for url in (f"embedded:{tmp_path / 'store'}", start("--appendonly", "yes", "--appendfsync", "no").url):
        store = await opened(url)
        assert Barrier(confirmed=True) == store._barrier
        assert 0 == await appended(store)

    store = await opened(start("--appendonly", "yes", "--appendfsync", "everysec").url)
    assert Barrier() == store._barrier


async def test_fsync_of_the_embedded_server(tmp_path, opened, command):
    """With durability fsync, the embedded server answers only when its file is on disk."""
    store = await opened(f"embedded:{tmp_path / 'store'}", durability="fsync")

    assert 0 == await appended(store)
    assert [[b"appendfsync", b"always"]] == await command(store, "CONFIG", "GET", "appendfsync")


async def test_fsync_waits_for_the_disk_of_a_server_that_syncs_each_second(start, opened):
    """With durability fsync, each write waits on its connection until the server has fsynced it, be it a second."""
    server = start("--appendonly", "yes", "--appendfsync", "everysec")
    store = await opened(server.url, durability="fsync")

    assert 0 == await appended(store)
    with server.client as client:
        writes = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert writes + 2 == client.info("commandstats")["cmdstat_waitaof"]["calls"]  # EVAL taught two scripts


async def test_fsync_needs_an_append_only_file(start, opened):
    """A server without an append-only file cannot promise fsync, and is refused with what to set."""
    server = start()

    with pytest.raises(StorageError, match=f"set appendonly yes on {server.where}"):
        await opened(server.url, durability="fsync")


async def test_fsync_on_an_old_server_needs_appendfsync_always(start_redis, opened):
    """A server without WAITAOF (before Redis 7.2) can promise fsync only if it always syncs."""
    server = start_redis("--appendonly", "yes")
    with server.client as client:
        if not client.info("server")["redis_version"].startswith("7.0."):
            pytest.skip("this redis-server has WAITAOF, so it is no old one")
        with pytest.raises(StorageError, match=r"fsync needs Redis 7\.2 or newer, or appendfsync always"):
            await opened(server.url, durability="fsync")
        client.config_set("appendfsync", "always")

    store = await opened(server.url, durability="fsync")

    assert 0 == await appended(store)


@pytest.fixture
async def replicated(start, opened, until):
    """A primary, its replica, and a store that wants every write on both."""
    primary = start("--repl-diskless-sync-delay", "0")
    replica = start("--replicaof", "127.0.0.1", str(primary.port))
    store = await opened(primary.url, durability="replicated", timeout_s=2)
    with replica.client as client:

        async def is_linked():
            return client.info("replication")["master_link_status"] == "up"

        await until(is_linked)
    return primary, replica, store


async def test_replicated_waits_for_the_replica(replicated):
    """With durability replicated, a write is on the replica when it is done."""
    _, replica, store = replicated

    await appended(store)

    with replica.client as client:
        assert 1 == sum(b":records:r" in key for key in client.scan_iter())


async def test_a_replica_that_does_not_answer_is_said(replicated):
    """A write that no replica confirmed in time raises `StoreUnreachable`, a repeated one too, until it is confirmed."""
    _, replica, store = replicated
    await appended(store, "s0")
    entry = StepWrite("r", (await store.get("r")).incarnation, "s1", b"1")
    os.kill(replica.process.pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(StoreUnreachable, match="reached 0 of 1 replicas in time; ask again"):
                await store.append(entry, now_ms=2)
    finally:
        os.kill(replica.process.pid, signal.SIGCONT)

    assert 1 == (await store.append(entry, now_ms=3)).position
    assert [b"1", b"1"] == await store.read("r", 0, 9)


async def test_a_replica_takes_no_writes(replicated, opened):
    """A store opened on a replica raises `StoreUnreachable` at the first write, in the server's words."""
    _, replica, _ = replicated
    store = await opened(replica.url)

    with pytest.raises(StoreUnreachable, match="READONLY"):
        await store.open("r", {}, now_ms=1)


async def test_replicated_in_a_cluster_waits_on_the_same_server(url_of, opened):
    """In a cluster too, a write without its replicas raises `StoreUnreachable`, from the server that has it."""
    store = await opened(url_of("cluster"), durability="replicated", timeout_s=2)

    with pytest.raises(StoreUnreachable, match="reached 0 of 1 replicas"):
        await appended(store)


async def test_an_embedded_store_has_no_replicas(tmp_path, opened):
    """Durability replicated is refused where there can be no replica."""
    with pytest.raises(ValueError, match="no replicas"):
        await opened(f"embedded:{tmp_path / 'store'}", durability="replicated")
