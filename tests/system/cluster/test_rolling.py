"""Proxies are replaced one by one under load, also by and from the last release, with one store."""

from tests.system.cluster.fleet import LOG, Traffic, judge, old_release, serving
from tests.system.cluster.nodes import clustered


async def test_rolling_restarts_fail_no_call(binary, tmp_path):
    """Each proxy is stopped and started twice behind HAProxy, as in docs/scaling.md."""
    async with clustered(binary, tmp_path) as cluster, serving(tmp_path, cluster.url) as fleet:
        traffic = Traffic(fleet.url).start(12)
        for number in (0, 1, 2, 0, 1, 2):
            await fleet.restart(number)
            await traffic.at_least(100)
        await traffic.stop()
        counts = await judge(fleet, traffic)
        LOG.info(dict(counts))

    assert not traffic.failures, traffic.failures[:3]


async def test_the_last_release_and_this_one_share_a_store(binary, tmp_path):
    """From 0.1.0 to this version, and back, under load: no step is lost or doubled, and no call fails."""
    source = old_release(tmp_path)
    async with clustered(binary, tmp_path) as cluster, serving(tmp_path, cluster.url, source=source) as fleet:
        traffic = Traffic(fleet.url).start(12)
        await traffic.at_least(300)
        for number in range(3):
            await fleet.restart(number)
            await traffic.at_least(300)
        for number in range(3):
            await fleet.restart(number, source)
            await traffic.at_least(300)
        await traffic.stop()
        counts = await judge(fleet, traffic)
        LOG.info(dict(counts))

    assert not traffic.failures, traffic.failures[:3]
