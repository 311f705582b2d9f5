"""A primary that Sentinels watch: a failover loses nothing that was acknowledged with `replicated`, and calls go on."""

import asyncio
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from tests.system.cluster.fleet import LOG, Traffic, judge, serving
from tests.system.cluster.nodes import guarded, promoted

_SERVES_S = 2.0


@pytest.mark.parametrize("how", ["killed", "frozen", "asked"])
async def test_calls_succeed_two_seconds_after_a_promotion(binary, how, tmp_path):
    """Whether the primary was killed, is frozen, or the failover was asked for; the old primary returns as a replica."""
    async with guarded(binary, tmp_path) as watched, serving(tmp_path, watched.url, durability="acknowledged") as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(500)
        old = await watched.primary()
        new = next(server for server in watched.servers if server is not old)
        before = asyncio.get_running_loop().time()
        if how == "asked":
            await watched.sentinels[0].ask("SENTINEL", "FAILOVER", "tt")
        else:
            old.send(SIGKILL if how == "killed" else SIGSTOP)
        promotion = await promoted(new)
        await traffic.at_least(300)
        if how == "killed":
            await old.start()
        elif how == "frozen":
            old.send(SIGCONT)
        await traffic.at_least(300)
        await traffic.stop()
        after = [at for at in traffic.ended_at.values() if at > promotion]

        def may_lose(uid: str) -> bool:
            return before - 1 <= traffic.ended_at[uid] <= promotion + 1

        counts = await judge(fleet, traffic, may_lose=may_lose)
        LOG.info(
            f"{how}: promotion after {promotion - before:.2f} s, served {min(after) - promotion:.2f} s later, {dict(counts)}"
        )

    assert min(after) - promotion <= _SERVES_S
