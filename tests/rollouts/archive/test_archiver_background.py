"""The archiver of running processes: the oldest one sweeps, and another one when it has gone."""

import asyncio

from prometheus_client import CollectorRegistry, generate_latest
from tests.support.archives import archived_versions, archiver, finished

from proxy.clock import SystemClock
from proxy.rollouts.archive.archiver import BackgroundArchive
from proxy.telemetry.metrics import make_metrics


def process(store, url, name, **options):
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    swept = asyncio.Event()
    found = archiver(store, url, **options)
    sweep = found.sweep

    async def noted():
        try:
            return await sweep()
        finally:
            swept.set()

    found.sweep = noted
    made = BackgroundArchive(found, store, SystemClock(), metrics, process_id=name, interval_s=0.01)
    made.swept, made.registry = swept, registry
    return made


async def test_the_oldest_process_archives_and_the_next_one_when_it_has_gone(store, tmp_path):
    first, second = process(store, tmp_path, "01"), process(store, tmp_path, "02")
    first.start()
    await first.swept.wait()
    second.start()
    touched = await finished(store, "a")
    async with asyncio.timeout(50):
        while not (before := await archived_versions(tmp_path)):
            await asyncio.sleep(0.01)
    leads = [await one.leads() for one in (first, second)]
    await first.close()
    touched |= await finished(store, "b")
    await second.swept.wait()
    async with asyncio.timeout(50):
        while len(after := await archived_versions(tmp_path)) < 2:
            await asyncio.sleep(0.01)
    await second.close()

    assert (["a"], [True, False], touched) == (list(before), leads, after)


async def test_a_failure_is_counted_and_the_next_sweep_continues(store, tmp_path):
    """The age of the oldest rollout that is not archived is a metric."""
    touched = await finished(store, "a")
    target = tmp_path / "file"
    target.write_text("in the way")
    one = process(store, target, "01")
    one.start()
    await one.swept.wait()
    target.unlink()
    async with asyncio.timeout(50):
        while not target.is_dir() or not (found := await archived_versions(target)):
            await asyncio.sleep(0.01)
    await one.close()
    counted = generate_latest(one.registry).decode()

    assert touched == found
    assert "tokentape_archive_failures_total 0.0" not in counted
    assert "tokentape_archive_oldest_age_seconds 0.0" in counted


async def test_the_age_of_a_rollout_that_waits_is_a_metric(store, tmp_path):
    await finished(store, "a", now_ms=SystemClock().now_ms() - 50_000)
    one = process(store, tmp_path, "01", older_than_s=3600)
    one.start()
    await one.swept.wait()
    await asyncio.sleep(0)
    counted = generate_latest(one.registry).decode()
    await one.close()
    (age,) = (
        line.split()[1] for line in counted.splitlines() if line.startswith("tokentape_archive_oldest_age_seconds ")
    )

    assert 50 <= float(age) < 3600
