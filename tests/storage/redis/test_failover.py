"""A store on a cluster with replicas: servers die, freeze and exchange their roles, and slots move, under load."""

import asyncio
import logging
import os
import shutil
import signal
import time
from contextlib import suppress
from itertools import count, islice, pairwise

import pytest
from redis.crc import key_slot

from storage.errors import StorageError, StoreUnreachable
from storage.types import StepWrite

LOG = logging.getLogger("failover")
CLI = shutil.which("redis-cli")
PIPELINE = os.environ.get("TOKENTAPE_TEST_CLUSTER_PIPELINE", "10")
MOVED = int(os.environ.get("TOKENTAPE_TEST_MOVED_ROLLOUTS", "300"))  # docs/scaling.md has figures for 6000


class Load:
    """Callers that append records to rollouts until they are stopped. `acknowledged`: rollout -> names of records."""

    def __init__(self, store, rollouts):
        self.store = store
        self.acknowledged = {rollout: [] for rollout in rollouts}
        self.failures = []  # rollout, time, error
        self.ends = []  # rollout, time
        self.slowest_s = 0.0
        self.stopped = False
        self.tasks = []

    async def __aenter__(self):
        self.tasks = [asyncio.create_task(self.call(rollout)) for rollout in self.acknowledged]
        await self.more(len(self.tasks) * 2)
        return self

    async def __aexit__(self, *_):
        self.stopped = True
        await asyncio.gather(*self.tasks)

    async def more(self, count, among=None):
        """Wait until this many more records are acknowledged."""
        wanted = {
            rollout: len(names) for rollout, names in self.acknowledged.items() if among is None or rollout in among
        }
        async with asyncio.timeout(60):
            while sum(len(self.acknowledged[rollout]) - before for rollout, before in wanted.items()) < count:
                await asyncio.sleep(0.01)

    async def call(self, rollout):
        number = 0
        while not self.stopped:
            began = time.monotonic()
            try:
                incarnation = (await self.store.open(rollout, {}, now_ms=1)).incarnation
                await self.store.append(StepWrite(rollout, incarnation, f"s{number}", b"1"), now_ms=2)
            except StorageError as error:
                self.failures.append((rollout, time.monotonic(), error))
            else:
                self.acknowledged[rollout].append(f"s{number}")
                self.ends.append((rollout, time.monotonic()))
                number += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(0.005)

    async def lost(self):
        """Return the acknowledged records that are not stored once."""
        stored = {rollout: await self.store.read_all(rollout, 10**6) for rollout in self.acknowledged}
        assert all(
            len(names) <= len(stored[name].records) <= len(names) + 1 for name, names in self.acknowledged.items()
        )
        return [
            (rollout, name)
            for rollout, names in self.acknowledged.items()
            for name in names
            if await self.store.find(rollout, name) is None
        ]


@pytest.fixture
async def load(replicated_cluster, opened):
    """Return a store with load on twelve rollouts of each primary, and the primaries of the rollouts."""
    for server in replicated_cluster:
        if server.send("ROLE")[0] == b"master":
            server.send("FLUSHALL")
    seeds = ",".join(server.address for server in replicated_cluster)
    store = await opened(f"redis+cluster://{seeds}", timeout_s=10)
    names = {server.address: [] for server in await store._servers.all()}
    for number in range(10_000):
        found = names[store.server_of(f"r{number}")]
        if len(found) < 12:
            found.append(f"r{number}")
    async with Load(store, [name for found in names.values() for name in found]) as load:
        yield load, names


def by_address(servers, address):
    return next(server for server in servers if server.address == address)


def replica_of(servers, primary):
    return next(
        server
        for server in servers
        if server is not primary and server.send("ROLE")[:3][1:] == [b"127.0.0.1", primary.port]
    )


async def promoted(server):
    """Wait until a server is a primary; return the time."""
    async with asyncio.timeout(60):
        while True:
            with suppress(Exception):
                if (await asyncio.to_thread(server.send, "ROLE"))[0] == b"master":
                    return time.monotonic()
            await asyncio.sleep(0.01)


async def back(servers, fault, lost):
    """Start or continue a server, and wait until it is a replica with the data of its primary."""
    if fault is signal.SIGSTOP:
        os.kill(lost.process.pid, signal.SIGCONT)
    else:
        lost.stop()
        lost.start()  # not in a thread, with which the server would end
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(lost.send, "ROLE"))[3:4] != [b"connected"]:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_dead_primary_is_replaced_and_others_are_not_affected(replicated_cluster, load, fault):
    """No call fails: those of its rollouts wait for the promotion of its replica, the others do not notice."""
    load, names = load
    address, rollouts = next(iter(names.items()))
    lost = by_address(replicated_cluster, address)
    replica = replica_of(replicated_cluster, lost)
    began = time.monotonic()
    os.kill(lost.process.pid, fault)
    promotion = await promoted(replica)
    await load.more(100, among=rollouts)
    await back(replicated_cluster, fault, lost)
    await load.more(100, among=rollouts)

    first = min(at for rollout, at in load.ends if rollout in rollouts and at > promotion)
    others = [at for rollout, at in load.ends if rollout not in rollouts and began < at < promotion]
    gap = max(after - before for before, after in pairwise(others))
    figures = (promotion - began, first - promotion, load.slowest_s, gap, len(others))
    LOG.info(
        "promoted after %.2f s, served %.2f s later, slowest call %.2f s; others: gap %.3f s in %d calls", *figures
    )
    assert load.failures == []
    assert replica.address == load.store.server_of(rollouts[0])


async def test_a_requested_failover_fails_no_call(replicated_cluster, load):
    """`CLUSTER FAILOVER` on a replica, as before maintenance of its primary."""
    load, names = load
    address, rollouts = next(iter(names.items()))
    primary = by_address(replicated_cluster, address)
    replica = replica_of(replicated_cluster, primary)
    replica.send("CLUSTER", "FAILOVER")
    promotion = await promoted(replica)
    await load.more(100, among=rollouts)

    first = min(at for rollout, at in load.ends if rollout in rollouts and at > promotion)
    LOG.info("served %.2f s after the promotion, slowest call %.2f s", first - promotion, load.slowest_s)
    load.stopped = True
    await asyncio.gather(*load.tasks)
    assert (load.failures, await load.lost()) == ([], [])


async def test_a_server_that_stays_away_fails_its_calls_at_once(cluster_servers, opened, url_of):
    """The first calls wait for the timeout; from then on they fail at once, until the server is back."""
    store = await opened(url_of("cluster"), timeout_s=1)
    victim = cluster_servers[1]
    lost = next(f"r{number}" for number in range(100) if store.server_of(f"r{number}") == victim.address)
    await store.open(lost, {}, now_ms=1)
    os.kill(victim.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnreachable) as failure:
            await store.open(lost, {}, now_ms=1)
        assert victim.address == failure.value.server
        async with asyncio.timeout(50):
            while store._servers.server_of(store.layout.rollout(lost).rollout).unreachable is None:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(0.5):
            for _ in range(100):
                with pytest.raises(StoreUnreachable, match="did not respond"):
                    await store.open(lost, {}, now_ms=1)
    finally:
        os.kill(victim.process.pid, signal.SIGCONT)
    async with asyncio.timeout(50):
        while True:
            with suppress(StoreUnreachable):
                await store.open(lost, {}, now_ms=1)
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["reshard", "MIGRATESLOTS"])
async def test_slots_move_without_a_failed_call(replicated_cluster, load, how):
    """Calls wait while `redis-cli --cluster reshard` moves populated slots, key by key, or Valkey 9 does, at once."""
    if how == "reshard" and CLI is None:
        pytest.skip("redis-cli is not installed (Debian: apt-get install redis-tools)")
    load, names = load
    source, target = list(names)[:2]

    def slot_of(name):
        return key_slot(load.store.layout.rollout(name).rollout)

    first = load.store._servers._owners.index(
        load.store._servers.server_of(load.store.layout.rollout(names[source][0]).rollout)
    )
    slot, moving = min(
        (slot_of(f"r{number}"), f"r{number}") for number in range(5000) if slot_of(f"r{number}") >= first
    )
    filling = list(islice((f"x{number}" for number in count() if slot_of(f"x{number}") == slot), MOVED))
    load.acknowledged[moving] = []
    load.tasks.append(asyncio.create_task(load.call(moving)))
    for start in range(0, MOVED, 100):
        opened = await asyncio.gather(*(load.store.open(name, {}, now_ms=1) for name in filling[start : start + 100]))
        writes = (StepWrite(it.name, it.incarnation, "s", b"record", {b"b": b"block"}) for it in opened)
        await asyncio.gather(*(load.store.append(write, now_ms=1) for write in writes))
    ids = [by_address(replicated_cluster, address).send("CLUSTER", "MYID").decode() for address in (source, target)]
    load.slowest_s = 0.0
    began = time.monotonic()
    if how == "reshard":
        process = await asyncio.create_subprocess_exec(
            CLI, "--cluster", "reshard", source, "--cluster-from", ids[0], "--cluster-to", ids[1], "--cluster-yes",
            "--cluster-pipeline", PIPELINE, "--cluster-slots", str(slot - first + 1),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output[-2000:]
    else:
        words = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", first, slot, "NODE", ids[1])
        assert by_address(replicated_cluster, source).send(*words) == b"OK"
        async with asyncio.timeout(60):
            while load.store.server_of(moving) != target:
                await asyncio.sleep(0.01)
    took = time.monotonic() - began
    await load.more(100)
    load.stopped = True
    await asyncio.gather(*load.tasks)

    LOG.info(
        "%d slots and %d rollouts of one in %.1f s; slowest call %.2f s", slot - first + 1, MOVED, took, load.slowest_s
    )
    assert load.failures == [], load.failures[:3]
    assert target == load.store.server_of(moving)
    assert await load.lost() == []
