"""Metrics of versions and of the store."""

import asyncio
import re
from importlib.metadata import version

from tests.support.fakes import proxying

from proxy.api import health


async def metric_lines(proxy, name):
    """Return the lines of a metric, as label text and value."""
    text = (await proxy.get("/metrics")).text.decode()
    return re.findall(rf"^tokentape_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)


async def test_metrics_have_the_versions_of_tokentape_and_of_the_engines(proxy):
    await proxy.chat("r1")

    assert [(f'{{version="{version("tokentape")}"}}', "1.0")] == await metric_lines(proxy, "build_info")
    assert await metric_lines(proxy, "engine_info") == [('{engine="fake",kind="vllm",version="simulator-0.1"}', "1.0")]


async def test_an_engine_that_was_never_reached_has_version_unknown(store, proxy):
    """The label is not empty, which Prometheus treats as a missing label."""
    async with (
        proxying("http://127.0.0.1:9", store) as served,
        proxy.http.get(served.url + "/metrics") as response,
    ):
        assert 'tokentape_engine_info{engine="fake",kind="auto",version="unknown"} 1.0' in await response.text()


async def test_metrics_have_the_stores_memory_and_whether_its_aof_is_written(proxy):
    """The embedded store has an append-only file and no memory limit."""
    ((_, memory),) = await metric_lines(proxy, "store_memory_bytes")

    assert float(memory) > 100_000
    ((labels, _),) = await metric_lines(proxy, "store_info")
    assert re.fullmatch(r'\{durability="acknowledged",version="valkey [\d.]+"\}', labels)
    assert await metric_lines(proxy, "store_memory_limit_bytes") == [("", "0.0")]
    assert await metric_lines(proxy, "store_aof_ok") == [("", "1.0")]


async def test_metrics_of_a_failing_or_slow_store_are_omitted(proxy, store, monkeypatch):
    """The other metrics are returned in time."""
    store.failing.add("info")
    failing = await metric_lines(proxy, "store_memory_bytes")
    store.failing.clear()
    store.waiting["info"] = asyncio.Event()
    with monkeypatch.context() as hurried:
        hurried.setattr(health, "_STORE_TIMEOUT_S", 0.05)
        slow = await metric_lines(proxy, "store_memory_bytes")
        version_meanwhile = await metric_lines(proxy, "build_info")
    store.waiting["info"].set()

    assert failing == slow == []
    assert len(version_meanwhile) == 1
    assert len(await metric_lines(proxy, "store_memory_bytes")) == 1


async def test_metrics_have_the_number_and_the_age_of_groups_in_the_queue(proxy):
    await proxy.group("g1", 1, 0)
    empty = [await metric_lines(proxy, name) for name in ("complete_groups", "claimed_groups")]
    await proxy.group("g2", 1, 0)
    await proxy.claim()
    full = [await metric_lines(proxy, name) for name in ("complete_groups", "claimed_groups")]
    ((_, age),) = await metric_lines(proxy, "oldest_complete_group_age_seconds")

    policy = '{policy="default"}'
    assert empty == [[(policy, "1.0")], [(policy, "0.0")]]
    assert full == [[(policy, "1.0")], [(policy, "1.0")]]
    assert 0 < float(age) < 60
