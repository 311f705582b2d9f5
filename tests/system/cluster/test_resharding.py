"""Slots with thousands of rollouts move between primaries under load."""

import asyncio

from tests.system.cluster.fleet import LOG, Traffic, judge, serving
from tests.system.cluster.nodes import clustered

from storage import StoreOptions, open_store
from storage.types import StepWrite

_ROLLOUTS = 6000  # in a slot that moves


async def fill_slot(url: str, slot: int, fleet) -> int:
    """Create rollouts of one step in a slot, for another installation; return how many."""
    store = await open_store(url, StoreOptions(prefix="others"))
    try:
        names = await fleet.names_in_slot(slot, _ROLLOUTS)
        for start in range(0, len(names), 200):
            part = names[start : start + 200]
            opened = await asyncio.gather(*(store.open(name, {}, now_ms=1) for name in part))
            steps = [StepWrite(one.name, one.incarnation, "s", b"record", {b"b": b"block"}, (), {}) for one in opened]
            await asyncio.gather(*(store.append(step, now_ms=1) for step in steps))
    finally:
        await store.close()
    return len(names)


async def test_no_call_fails_while_slots_of_six_thousand_rollouts_move(binary, tmp_path):
    """Neither calls of the slots that move, nor others; `redis-cli --cluster reshard` as documented."""
    async with clustered(binary, tmp_path) as cluster, serving(tmp_path, cluster.url) as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(2500)
        slots = sorted(set((await fleet.slots(sorted(set(traffic.rollouts.values())))).values()))
        moved = slots[0]
        assert await fill_slot(cluster.url, moved, fleet) == _ROLLOUTS
        source = await cluster.primary_of(moved)
        (target, _) = [server for server in await cluster.primaries() if server is not source]
        ids = {server: str(await server.ask("CLUSTER", "MYID")) for server in (source, target)}
        began, before = asyncio.get_running_loop().time(), len(traffic.ended)
        await cluster.cli(
            "reshard", source.address, "--cluster-from", ids[source], "--cluster-to", ids[target],
            "--cluster-slots", "2000", "--cluster-yes",
        )  # fmt: skip
        took = asyncio.get_running_loop().time() - began
        during = len(traffic.ended) - before
        await traffic.at_least(500)
        await traffic.stop()
        owner = await cluster.primary_of(moved)
        counts = await judge(fleet, traffic)
        LOG.info(f"2,000 slots moved in {took:.1f} s; {during} calls meanwhile; {dict(counts)}")

    assert owner is target
    assert not traffic.failures, f"{len(traffic.failures)} calls failed: {traffic.failures[:3]}"
