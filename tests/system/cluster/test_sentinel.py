"""A primary that Sentinels watch: a failover loses nothing that was acknowledged with `replicated`, and calls go on."""

import asyncio
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import pytest
from tests.system.cluster.fleet import LOG, Traffic, judge, serving
from tests.system.cluster.nodes import demoted, guarded, promoted

_SERVES_S = 2.0
_LAG_S = 1.0


@pytest.mark.parametrize("how", ["killed", "frozen", "stopped", "asked"])
async def test_calls_succeed_two_seconds_after_a_promotion(binary, how, tmp_path):
    """Whether the primary was killed, is frozen, stops (SIGTERM), or the failover was asked for.

    Only a primary that goes on until it learns of its successor loses acknowledged steps, if `replicated` is not required.
    """
    async with guarded(binary, tmp_path) as watched, serving(tmp_path, watched.url, durability="acknowledged") as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(500)
        old = await watched.primary()
        new = next(server for server in watched.servers if server is not old)
        before = asyncio.get_running_loop().time()
        if how == "asked":
            await watched.sentinels[0].ask("SENTINEL", "FAILOVER", "tt")
        else:
            old.send({"killed": SIGKILL, "frozen": SIGSTOP, "stopped": SIGTERM}[how])
        promotion = await promoted(new)
        await traffic.at_least(300)
        if how == "frozen":
            old.send(SIGCONT)
        elif how != "asked":
            await old.start()
        await traffic.at_least(300)
        await traffic.stop()
        after = [at for at in traffic.ended_at.values() if at > promotion]

        def may_lose(uid: str) -> bool:
            return how != "stopped" and before - _LAG_S <= traffic.ended_at[uid] <= promotion + _SERVES_S

        counts = await judge(fleet, traffic, may_lose=may_lose)
        LOG.info(
            f"{how}: promotion after {promotion - before:.2f} s, served {min(after) - promotion:.2f} s later, {dict(counts)}"
        )

    assert min(after) - promotion <= _SERVES_S


async def test_with_replicated_a_failover_that_was_asked_for_loses_nothing(binary, tmp_path):
    """The primary that goes on has no replica any more, so that its writes are not acknowledged."""
    async with guarded(binary, tmp_path) as watched, serving(tmp_path, watched.url) as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(500)
        old = await watched.primary()
        await watched.sentinels[0].ask("SENTINEL", "FAILOVER", "tt")
        await demoted(old)
        await traffic.at_least(300)
        await traffic.stop()
        counts = await judge(fleet, traffic)
        LOG.info(f"asked, replicated: {dict(counts)}")
