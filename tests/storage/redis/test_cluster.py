"""The cluster: spread evenly, and followed when it changes."""

import asyncio

import pytest
from redis.crc import key_slot

from storage.errors import StorageError, StoreUnreachable
from storage.redis.keys import rollout_keys
from storage.types import StepWrite


@pytest.fixture
async def store(url_of, opened):
    """An empty store on the cluster."""
    return await opened(url_of("cluster"), timeout_s=2)


async def test_rollouts_are_spread_over_all_primaries(store, command):
    """Each primary keeps about its share of the rollouts."""
    await asyncio.gather(*(store.open(f"r{i}", {}, now_ms=i) for i in range(300)))

    assert all(60 < count < 150 for count in await command(store, "DBSIZE"))
    assert 3 == (await store.info())["servers"].count("127.0.0.1")


async def test_any_server_of_the_cluster_leads_to_it(cluster_servers, url_of, opened, store):
    """A cluster is found by any of its servers, and by a list of which some are dead."""
    await store.open("r", {}, now_ms=1)
    dead = "redis+cluster://127.0.0.1:1"

    for server in cluster_servers:
        other = await opened(f"{dead},{server.where}")
        assert ("r",) == (await other.list()).names


async def test_no_server_is_away(opened):
    """When no server of a cluster answers, `StoreUnreachable` names them."""
    with pytest.raises(StoreUnreachable, match=r"127.0.0.1:1 .*; .*127.0.0.1:2 "):
        await opened("redis+cluster://127.0.0.1:1,127.0.0.1:2")


async def test_the_wrong_kind_of_url_is_said(cluster_servers, redis_server, opened):
    """A cluster opened as one server, or the other way round, is refused with the URL to write."""
    where = cluster_servers[0].where
    with pytest.raises(StorageError, match=rf"write redis\+cluster://{where}"):
        await opened(f"redis://{where}")
    with pytest.raises(StorageError, match=f"write redis://{redis_server.where}"):
        await opened(f"redis+cluster://{redis_server.where}")


async def test_a_wrong_map_is_put_right(store):
    """When the cluster says that a slot is elsewhere, the call goes there."""
    cluster = store._servers
    places = sorted(set(cluster._owners))
    cluster._owners = [places[places.index(owner) - 1] for owner in cluster._owners]

    incarnation = (await store.open("r", {}, now_ms=1)).incarnation

    assert 0 == (await store.append(StepWrite("r", incarnation, "s", b"1"), now_ms=2)).position
    assert ("r",) == (await store.list()).names


@pytest.mark.parametrize("owner", [("127.0.0.1", 1), None])
async def test_a_lost_owner_is_looked_for(store, owner):
    """When the server that held a slot is gone, or none was known, the cluster is asked anew who holds it."""
    store._servers._owners = [owner] * 16_384

    assert (await store.open("r", {}, now_ms=1)).created


async def test_a_moving_slot_is_followed(store, cluster_servers):
    """While a slot moves, its rollouts can be looked at, and writes are away; once it has moved, all goes there."""
    key = rollout_keys("tt", "r").rollout
    slot = key_slot(key)
    nodes = {}
    for server in cluster_servers:
        with server.client as client:
            nodes[server.port] = (server, client.execute_command("CLUSTER", "MYID").decode())
    source = nodes.pop(store._servers._owners[slot][1])
    target = nodes.popitem()[1]

    def tell(server, *words):
        with server.client as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, *words)

    tell(target[0], "IMPORTING", source[1])
    tell(source[0], "MIGRATING", target[1])
    try:
        assert None is await store.get("r")
        with pytest.raises(StoreUnreachable, match="is moving from one server to another"):
            await store.open("r", {}, now_ms=1)
    finally:
        for server in (target[0], source[0], *(server for server, _ in nodes.values())):
            tell(server, "NODE", target[1])

    assert (await store.open("r", {}, now_ms=1)).created
    assert target[0].port == store._servers._owners[slot][1]


async def test_a_dead_primary_takes_only_its_own_rollouts_away(store, cluster_servers, until):
    """When a primary dies, its rollouts raise `StoreUnreachable` in time and the others' go on; when it is back, they do."""
    victim = cluster_servers[2]
    slots = store._servers._owners
    owners = {name: slots[key_slot(rollout_keys("tt", name).rollout)][1] for name in map(str, range(100))}
    lost = next(name for name, port in owners.items() if port == victim.port)
    kept = next(name for name, port in owners.items() if port != victim.port)
    await store.open(kept, {}, now_ms=1)
    victim.stop()
    try:
        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable):
                await store.open(lost, {}, now_ms=1)
            with pytest.raises(StoreUnreachable):
                await store.ping()
        assert not (await store.open(kept, {}, now_ms=2)).created
    finally:
        victim.start()

    async def is_back():
        try:
            await store.open(lost, {}, now_ms=3)
        except StoreUnreachable:
            return False
        return True

    await until(is_back)
