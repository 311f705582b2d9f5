"""A primary of a cluster dies or freezes: the other shards do not notice, and nothing that was acknowledged is lost."""

import asyncio
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from tests.system.cluster.fleet import LOG, Fleet, Traffic, judge, serving
from tests.system.cluster.nodes import RedisCluster, clustered, promoted

_SERVES_S = 2.0
_LAG_S = 1.0  # of a replica whose primary is killed: it has all writes that are older
_MORE_THAN_BUFFERS = 64_000_000  # bytes in flight to a replica that the buffers of its sockets cannot hold
_LOST = 5


async def shard_of_rollouts(cluster: RedisCluster, fleet: Fleet, traffic: Traffic) -> dict[str, int]:
    """Return the port of the primary of each rollout."""
    names = sorted(set(traffic.rollouts.values()))
    owners = {slot: await cluster.primary_of(slot) for slot in set((await fleet.slots(names)).values())}
    return {name: owners[slot].port for name, slot in (await fleet.slots(names)).items()}


@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("durability", ["acknowledged", "replicated"])
async def test_calls_of_other_shards_succeed_while_a_primary_is_gone(binary, durability, signal, tmp_path):
    """Its own calls fail until its replica is promoted, and succeed at most two seconds later; no step is lost or doubled.

    With `replicated` they succeed once the promoted server has a replica again: here the old primary, which returns.
    """
    async with clustered(binary, tmp_path) as cluster, serving(tmp_path, cluster.url, durability=durability) as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(2500)  # each agent has called in all of its rollouts
        shards = await shard_of_rollouts(cluster, fleet, traffic)
        lost = cluster.by_port(shards["r0-1"])
        shard = {name for name, port in shards.items() if port == lost.port}
        replica = await cluster.replica_of(lost)
        began = asyncio.get_running_loop().time()
        lost.send(signal)
        gone = asyncio.get_running_loop().time()
        serves = promotion = await promoted(replica)
        if durability == "acknowledged":
            await traffic.at_least_of(shard, 50)
        lost.send(SIGCONT) if signal is SIGSTOP else await lost.start()
        await cluster.settled()
        if durability == "replicated":
            serves = asyncio.get_running_loop().time()
        await traffic.at_least_of(shard, 50)
        await traffic.stop()
        after = min(at for uid, at in traffic.ended_at.items() if at > serves and traffic.rollouts[uid] in shard)
        failed = [failure for failure in traffic.failures if failure.rollout not in shard]

        def may_lose(uid: str) -> bool:
            is_late = began - _LAG_S <= traffic.ended_at[uid] <= gone + _LAG_S
            return durability == "acknowledged" and traffic.rollouts[uid] in shard and is_late

        counts = await judge(fleet, traffic, may_lose=may_lose)
        LOG.info(f"promotion after {promotion - began:.2f} s, served {after - serves:.2f} s later, {dict(counts)}")

    assert not failed, f"{len(failed)} of {len(traffic.failures)} failed calls were on other shards: {failed[:3]}"
    assert after - serves <= _SERVES_S


@pytest.mark.parametrize("durability", ["acknowledged", "replicated"])
async def test_a_failover_to_a_replica_that_lags_loses_what_it_has_not_received(binary, durability, tmp_path):
    """With `acknowledged`: of this shard, and since the replica lags. With `replicated`: nothing."""
    async with clustered(binary, tmp_path) as cluster, serving(tmp_path, cluster.url, durability=durability) as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(2500)
        shards = await shard_of_rollouts(cluster, fleet, traffic)
        shard = {name for name, port in shards.items() if port == shards["r0-1"]}
        lost = cluster.by_port(shards["r0-1"])
        replica = await cluster.replica_of(lost)
        replica.send(SIGSTOP)
        frozen = asyncio.get_running_loop().time()
        await lost.ask("SET", await fleet.key_beside("r0-1"), "x" * _MORE_THAN_BUFFERS)  # before what follows
        await (traffic.at_least_of(shard, _LOST) if durability == "acknowledged" else traffic.at_least(100))
        lost.send(SIGKILL)
        killed = asyncio.get_running_loop().time()
        replica.send(SIGCONT)
        await promoted(replica)
        await lost.start()
        await cluster.settled()
        await traffic.at_least_of(shard, 50)
        await traffic.stop()

        def may_lose(uid: str) -> bool:
            is_since = frozen - _LAG_S <= traffic.ended_at[uid] <= killed + _LAG_S
            return durability == "acknowledged" and traffic.rollouts[uid] in shard and is_since

        counts = await judge(fleet, traffic, may_lose=may_lose)
        LOG.info(f"{durability}: the replica lagged for {killed - frozen:.2f} s: {dict(counts)}")

    assert (counts["lost"] >= _LOST) == (durability == "acknowledged")


async def test_a_planned_failover_fails_no_call(binary, tmp_path):
    """`CLUSTER FAILOVER` at a replica, before its primary is stopped."""
    async with clustered(binary, tmp_path) as cluster, serving(tmp_path, cluster.url) as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(500)
        for primary in await cluster.primaries():
            replica = await cluster.replica_of(primary)
            await replica.ask("CLUSTER", "FAILOVER")
            await promoted(replica)
            await cluster.settled()
            await traffic.at_least(100)
        await traffic.stop()
        counts = await judge(fleet, traffic)
        LOG.info(f"three planned failovers: {dict(counts)}")

    assert not traffic.failures, traffic.failures[:3]
