"""A store on a cluster: distribution, redirections and dead servers."""

import asyncio
from contextlib import ExitStack
from functools import partial

import pytest
from redis.crc import key_slot

from storage.errors import StorageError, StoreUnreachable
from storage.redis.connections import Connections
from storage.types import StepWrite


@pytest.fixture
async def store(url_of, opened):
    """Return an empty store on the cluster."""
    return await opened(url_of("cluster"), timeout_s=2)


def port_of(store, slot):
    return int(store._servers._owners[slot].address.rpartition(":")[2])


async def test_rollouts_are_spread_over_all_primaries(store, command):
    """Each primary has about its share of the rollouts."""
    await asyncio.gather(*(store.open(f"r{i}", {}, now_ms=i) for i in range(300)))

    assert all(60 < len(keys) < 150 for keys in await command(store, "KEYS", "*:rollout:*"))
    assert (await store.info())["servers"].count("127.0.0.1") == 3


async def test_any_server_of_a_cluster_is_a_seed(cluster_servers, url_of, opened, store):
    """A cluster is discovered from any of its servers, and from a list with dead servers."""
    await store.open("r", {}, now_ms=1)
    dead = "redis+cluster://127.0.0.1:1"

    for server in cluster_servers:
        other = await opened(f"{dead},{server.address}")
        assert (await other.list()).names == ("r",)


async def test_a_cluster_without_servers_is_unreachable(opened):
    """If no server responds, `StoreUnreachable` names all of them."""
    with pytest.raises(StoreUnreachable, match=r"127.0.0.1:1 .*; .*127.0.0.1:2 "):
        await opened("redis+cluster://127.0.0.1:1,127.0.0.1:2")


async def test_a_url_of_the_wrong_kind_is_refused(cluster_servers, redis_server, opened):
    """The error has the right URL for a server of a cluster, and for a server without one."""
    address = cluster_servers[0].address
    with pytest.raises(StorageError, match=rf"use the URL redis\+cluster://{address}"):
        await opened(f"redis://{address}")
    with pytest.raises(StorageError, match=f"use the URL redis://{redis_server.address}"):
        await opened(f"redis+cluster://{redis_server.address}")


async def test_a_wrong_slot_map_is_corrected(store):
    """When a server replies MOVED, the command is sent to the right server."""
    cluster = store._servers
    owners = await cluster.all()
    cluster._owners = [owners[owners.index(owner) - 1] for owner in cluster._owners]

    incarnation = (await store.open("r", {}, now_ms=1)).incarnation

    assert (await store.append(StepWrite("r", incarnation, "s", b"1"), now_ms=2)).position == 0
    assert (await store.list()).names == ("r",)


async def test_what_goes_to_all_buckets_is_one_write_to_each_primary(store, monkeypatch):
    """Redirected parts are sent again."""
    cluster = store._servers
    await asyncio.gather(*(store.open(f"r{i}", {}, now_ms=i) for i in range(50)))
    await store.list()
    sent = []
    execute = Connections.execute

    async def counted(self, key, commands, **options):
        sent.append(len(commands))
        return await execute(self, key, commands, **options)

    monkeypatch.setattr(Connections, "execute", counted)
    assert len((await store.list()).names) == 50
    assert sorted(sent) == [85, 85, 86]

    owners = await cluster.all()
    cluster._owners = [owners[owners.index(owner) - 1] for owner in cluster._owners]
    assert len((await store.list()).names) == 50


@pytest.mark.parametrize("owner", [("127.0.0.1", 1), None])
async def test_an_unknown_primary_is_discovered(store, owner):
    """When the primary of a slot is dead or unknown, the slots are requested again."""
    store._servers._owners = [owner and store._servers._server(owner)] * 16_384

    assert (await store.open("r", {}, now_ms=1)).created


async def test_a_slot_in_migration_is_handled(store, cluster_servers):
    """During a migration, reads succeed and writes raise `StoreUnreachable`; after it, commands use the new server."""
    key = store.layout.rollout("r").rollout
    slot = key_slot(key)
    nodes = {}
    for server in cluster_servers:
        with server.client as client:
            nodes[server.port] = (server, client.execute_command("CLUSTER", "MYID").decode())
    source = nodes.pop(port_of(store, slot))
    target = nodes.popitem()[1]

    def set_slot(server, *words):
        with server.client as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, *words)

    set_slot(target[0], "IMPORTING", source[1])
    set_slot(source[0], "MIGRATING", target[1])
    try:
        assert None is await store.get("r")
        with pytest.raises(
            StoreUnreachable, match="is moving to another server of the cluster, for longer than store.timeout_s"
        ):
            await store.open("r", {}, now_ms=1)
    finally:
        for server in (target[0], source[0], *(server for server, _ in nodes.values())):
            set_slot(server, "NODE", target[1])

    assert (await store.open("r", {}, now_ms=1)).created
    assert target[0].port == port_of(store, slot)


def move_empty_slot(cluster_servers, slot, source_port):
    """Give a slot to another primary, which imports it: with a new epoch, so that no older gossip gives it back."""
    with ExitStack() as stack:
        clients = {server.port: stack.enter_context(server.client) for server in cluster_servers}
        nodes = {port: client.execute_command("CLUSTER", "MYID").decode() for port, client in clients.items()}
        target = next(port for port in clients if port != source_port)
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", nodes[source_port])
        for client in (clients[target], *clients.values()):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", nodes[target])


async def test_a_subscription_ends_when_a_slot_moves(store, cluster_servers):
    """Changes may have been missed; a new one has the changes of the slot's new primary."""
    slot = key_slot(store.layout.rollout("r").rollout)
    async with store.changes.subscribe() as changes:
        move_empty_slot(cluster_servers, slot, port_of(store, slot))
        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable, match="may have been missed"):
                [change async for change in changes]
    async with store.changes.subscribe() as changes:
        await store.open("r", {}, now_ms=1)
        async with asyncio.timeout(50):
            assert (await next_change(changes)).rollout == "r"


async def test_a_subscription_continues_while_a_primary_is_dead(store, cluster_servers, until):
    """It has the changes of the others, and ends when the primary is back."""
    victim = cluster_servers[1]
    owners = {name: port_of(store, key_slot(store.layout.rollout(name).rollout)) for name in map(str, range(100))}
    lost = next(name for name, port in owners.items() if port == victim.port)
    kept = next(name for name, port in owners.items() if port != victim.port)
    async with store.changes.subscribe() as first:
        victim.stop()
        try:
            async with asyncio.timeout(50), store.changes.subscribe() as second:
                await store.open(kept, {}, now_ms=1)
                received = [(await next_change(changes)).rollout for changes in (first, second)]
        finally:
            victim.start()
        await until(partial(can_open, store, lost))
        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable, match="may have been missed"):
                [change async for change in first]

    assert received == [kept] * 2


async def can_open(store, name):
    try:
        await store.open(name, {}, now_ms=3)
    except StoreUnreachable:
        return False
    return True


async def next_change(changes):
    while (change := await anext(changes)) is None:
        pass
    return change


async def test_a_store_is_opened_without_a_dead_primary(store, cluster_servers, opened):
    """Unless it has the key of the store itself."""
    needed = store._servers.server_of(store.layout.constants).address
    victim = next(server for server in cluster_servers if server.address != needed)
    victim.stop()
    try:
        other = await opened(store_url(cluster_servers), timeout_s=2)
        assert victim.address == (await other.info())["unreachable"]
        assert any(victim.address in warning.problem for warning in await other.warnings())
    finally:
        victim.start()
    async with asyncio.timeout(50):
        while True:
            opens = (store.open(f"r{number}", {}, now_ms=1) for number in range(30))
            if not any(isinstance(it, Exception) for it in await asyncio.gather(*opens, return_exceptions=True)):
                return
            await asyncio.sleep(0.02)


def store_url(servers):
    return "redis+cluster://" + ",".join(server.address for server in servers)


async def test_a_dead_primary_affects_only_its_own_rollouts(store, cluster_servers, until):
    """Its rollouts raise `StoreUnreachable` within the timeout until it is back; other rollouts are not affected."""
    victim = cluster_servers[2]
    owners = {
        name: store._servers.server_of(store.layout.rollout(name).rollout).address for name in map(str, range(100))
    }
    lost = next(name for name, address in owners.items() if address == victim.address)
    kept = next(name for name, address in owners.items() if address != victim.address)
    await store.open(kept, {}, now_ms=1, timer_ms=5)
    victim.stop()
    try:
        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable):
                await store.open(lost, {}, now_ms=1)
            assert [victim.address] == [server for server, reason in (await store.ping(2)).items() if reason]
            assert victim.address == (await store.info())["unreachable"]
        assert not (await store.open(kept, {}, now_ms=2)).created
        async with asyncio.timeout(50):
            assert [timer.rollout for timer in await store.timers.claim(9, now_ms=5, until_ms=6)] == [kept]
            with pytest.raises(StoreUnreachable):
                await store.list()
    finally:
        victim.start()

    await until(partial(can_open, store, lost))
