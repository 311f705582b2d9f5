"""What /metrics tells beside what was counted."""

import asyncio
import re
from importlib.metadata import version

from fakes import proxying

from proxy.api import health as told


async def told_by(proxy, name):
    """The lines of a metric, as label text and value."""
    text = (await proxy.get("/metrics")).text.decode()
    return re.findall(rf"^tokentape_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)


async def test_the_version_and_the_engines_are_told(proxy):
    """So that a graph can say since when another version answers."""
    await proxy.chat("r1")

    assert [(f'{{version="{version("tokentape")}"}}', "1.0")] == await told_by(proxy, "build_info")
    assert [('{engine="fake",kind="vllm",version="simulator-0.1"}', "1.0")] == await told_by(proxy, "engine_info")


async def test_an_engine_that_nobody_met_is_told_as_unknown(store, proxy):
    """Its labels are never empty, which Prometheus would take for none."""
    async with (
        proxying("http://127.0.0.1:9", store) as served,
        proxy.http.get(served.url + "/metrics") as response,
    ):
        assert 'tokentape_engine_info{engine="fake",kind="auto",version="unknown"} 1.0' in await response.text()


async def test_the_store_tells_its_memory_and_whether_it_writes_its_file(proxy):
    """The embedded one keeps an append-only file, and has no bound."""
    ((_, memory),) = await told_by(proxy, "store_memory_bytes")

    assert float(memory) > 100_000
    ((labels, _),) = await told_by(proxy, "store_info")
    assert re.fullmatch(r'\{durability="acknowledged",version="valkey [\d.]+"\}', labels)
    assert [("", "0.0")] == await told_by(proxy, "store_memory_limit_bytes")
    assert [("", "1.0")] == await told_by(proxy, "store_aof_ok")


async def test_a_store_that_does_not_say_is_left_out(proxy, store, monkeypatch):
    """Whether it fails, is known to be away, or is slow: Prometheus is answered, and in time."""
    store.failing.add("info")
    failing = await told_by(proxy, "store_memory_bytes")
    store.failing.clear()
    store.waiting["info"] = asyncio.Event()
    with monkeypatch.context() as hurried:
        hurried.setattr(told, "_STORE_TIMEOUT_S", 0.05)
        slow = await told_by(proxy, "store_memory_bytes")
        version_meanwhile = await told_by(proxy, "build_info")
    store.waiting["info"].set()

    assert [] == failing == slow
    assert 1 == len(version_meanwhile)
    assert 1 == len(await told_by(proxy, "store_memory_bytes"))
