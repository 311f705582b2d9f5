"""The metrics of all worker processes, summed."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry, Gauge

from proxy.telemetry import multiprocess
from proxy.telemetry.metrics import make_metrics
from proxy.telemetry.multiprocess import Family, WorkerMetrics, WorkerSlot, encoded, respond_at


@pytest.fixture
async def workers(tmp_path):
    """Start workers by number; each returns its metrics and its sum."""
    started = []

    async def workers(number):
        registry = CollectorRegistry()
        metrics = make_metrics(registry)
        worker = WorkerMetrics(registry, metrics, WorkerSlot(number, tmp_path))
        await worker.start()
        started.append(worker)
        return metrics, worker

    yield workers
    for worker in started:
        await worker.close()


async def value_of(totals, line):
    """Return the value of a sample in the exposition."""
    return value_in(await totals.exposition(), line)


def value_in(exposition, line):
    """Return the value of a sample."""
    (value,) = re.findall(rf"^{re.escape(line)} (\S+)$", exposition.decode(), re.MULTILINE)
    return float(value)


async def test_the_supervisor_s_metrics_are_added(workers, tmp_path):
    """They are served in the same way."""
    name = "tokentape_waiting_connections"
    families = [Family(name, "gauge", "", {(name, ()): 5})]
    server = await respond_at(tmp_path / "supervisor.sock", lambda: encoded(families))
    metrics, worker = await workers(0)
    metrics.waiting_connections.set(2)
    async with server:
        assert await value_of(worker, name) == 7


async def test_any_worker_returns_the_sum_of_all(workers):
    """Counters are summed by label, histograms by bucket, and gauges too, for every scrape."""
    started = [await workers(number) for number in range(3)]
    for number, (metrics, _) in enumerate(started):
        metrics.calls.labels("chat", "e", "200").inc(number + 1)
        metrics.call_duration_seconds.labels("chat", "e", "200").observe(0.02 * number)
        metrics.in_flight_calls.set(2)

    for _ in range(2):
        for _, any_of_them in started:
            shown = await any_of_them.exposition()
            assert value_in(shown, 'tokentape_calls_total{dialect="chat",engine="e",status="200"}') == 6
            labels = 'dialect="chat",engine="e"'
            bucket = f'tokentape_call_duration_seconds_bucket{{{labels},le="0.025",status="200"}}'
            assert value_in(shown, bucket) == 2
            assert value_in(shown, f'tokentape_call_duration_seconds_count{{{labels},status="200"}}') == 3
            assert value_in(shown, "tokentape_in_flight_calls") == 6
            assert value_in(shown, "tokentape_workers") == 3


async def test_states_are_the_minimum_or_maximum_of_all_workers(workers):
    """The store is up if every worker can reach it, an endpoint is healthy if any worker can use it."""
    (first, totals), (other, _) = await workers(0), await workers(1)
    both_up = await value_of(totals, "tokentape_store_up")
    other.store_up.set(0)
    first.engine_healthy.labels("e").set(1)
    other.engine_healthy.labels("e").set(0)
    first.oldest_call_age_seconds.set(1)
    other.oldest_call_age_seconds.set(7)

    assert (both_up, await value_of(totals, "tokentape_store_up")) == (1, 0)
    assert await value_of(totals, 'tokentape_engine_healthy{engine="e"}') == 1
    assert await value_of(totals, "tokentape_oldest_call_age_seconds") == 7


async def test_a_replaced_worker_continues_the_last_known_counters(workers):
    """Prometheus would read a lower sum as a restart from 0. Gauges of the ended worker are dropped."""
    (first, totals), (other, dead) = await workers(0), await workers(1)
    first.undelivered_steps.inc(1)
    other.undelivered_steps.inc(10)
    other.in_flight_calls.set(5)
    counts = [await value_of(totals, "tokentape_undelivered_steps_total")]
    await dead.close()
    counts.append(await value_of(totals, "tokentape_undelivered_steps_total"))
    flying = await value_of(totals, "tokentape_in_flight_calls")
    new, _ = await workers(1)
    new.undelivered_steps.inc(100)
    counts += [await value_of(totals, "tokentape_undelivered_steps_total") for _ in range(2)]
    new, last = await workers(1)
    counts.append(await value_of(last, "tokentape_undelivered_steps_total"))

    assert counts == [11, 11, 111, 111, 111]
    assert flying == 0
    assert await value_of(totals, "tokentape_workers_missing_total") == 2


async def test_a_worker_that_does_not_respond_is_counted_as_missing(workers, tmp_path, monkeypatch):
    """The scrape takes about a second."""
    monkeypatch.setattr(multiprocess, "_TIMEOUT_S", 0.05)
    metrics, worker = await workers(0)
    metrics.undelivered_steps.inc(3)
    over = asyncio.Event()

    async def ignore(_, writer):
        await over.wait()
        writer.close()

    silent = await asyncio.start_unix_server(ignore, tmp_path / "1.sock")

    assert await value_of(worker, "tokentape_undelivered_steps_total") == 3
    assert await value_of(worker, "tokentape_workers") == 1
    assert await value_of(worker, "tokentape_workers_missing_total") == 3
    over.set()
    silent.close()


async def test_a_slow_worker_does_not_look_restarted(tmp_path):
    """The youngest worker determines the start time, also if it does not respond: each change of it is a restart."""
    started = []
    for number, second in ((0, 100.0), (1, 200.0)):
        registry = CollectorRegistry()
        Gauge("process_start_time_seconds", "When it started.", registry=registry).set(second)
        worker = WorkerMetrics(registry, make_metrics(CollectorRegistry()), WorkerSlot(number, tmp_path))
        await worker.start()
        started.append(worker)
    oldest, youngest = started
    before = await value_of(oldest, "process_start_time_seconds")
    await youngest.close()

    assert (before, await value_of(oldest, "process_start_time_seconds")) == (200, 200)
    await oldest.close()


async def test_a_single_process_returns_its_own_metrics(tmp_path):
    """It counts as one worker."""
    registry = CollectorRegistry()
    make_metrics(registry).undelivered_steps.inc()
    alone = WorkerMetrics(registry, make_metrics(CollectorRegistry()))
    await alone.start()

    assert await value_of(alone, "tokentape_undelivered_steps_total") == 1
    assert await value_of(alone, "tokentape_workers") == 1
    await alone.close()


def without_process_values(exposition: bytes) -> list[bytes]:
    """Return the lines of an exposition, without the values of process_* metrics, which change at any time."""
    return [line.split()[0] if line.startswith(b"process_") else line for line in exposition.splitlines()]


async def test_workers_expose_the_same_format_as_a_single_process(tmp_path):
    """Names, types, help texts, labels and their order are equal."""
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    metrics.calls.labels("chat", 'a "quoted" name\n', "200").inc()
    worker = WorkerMetrics(registry, metrics, WorkerSlot(0, tmp_path))

    alone = await WorkerMetrics(registry, metrics).exposition()
    assert without_process_values(alone) == without_process_values(await worker.exposition())


def windows_of(exposition):
    """Return the values of the counts of rewards of the default policy by window."""
    found = re.findall(
        r'^tokentape_reward_count\{policy="default",versions="(\d+)-\d+"\} (\S+)$', exposition, re.MULTILINE
    )
    return {int(version): float(value) for version, value in found}


def reward(metrics, version, times=1):
    for _ in range(times):
        metrics.reward.labels("default", metrics.reward_windows.of("default", str(version))).observe(1)


async def test_old_windows_of_versions_end_in_the_sum_of_all_workers(workers):
    """Although one worker still has them; a sum never falls before its series ends."""
    (first, totals), (second, _) = await workers(0), await workers(1)
    reward(first, 5)
    reward(second, 5, 3)
    assert windows_of((await totals.exposition()).decode())[0] == 4
    for version in range(100, 190, 10):
        reward(first, version)
    shown = windows_of((await totals.exposition()).decode())

    assert (0 in shown, len(shown), shown[100]) == (False, 10, 1)


async def test_a_worker_takes_over_the_windows_of_the_previous_one_and_ends_them(workers):
    """So that restarts do not add windows."""
    before, totals = await workers(0)
    reward(before, 120, 2)
    await totals.exposition()
    await totals.close()
    after, totals = await workers(0)
    reward(after, 120)
    assert windows_of((await totals.exposition()).decode())[120] == 3
    for version in range(200, 300, 10):
        reward(after, version)
    shown = windows_of((await totals.exposition()).decode())

    assert (120 in shown, len(shown)) == (False, 10)


async def test_the_windows_of_an_earlier_run_end_in_every_worker(workers):
    """When a lower version is announced, also in a worker that handles no claims."""
    (first, totals), (second, _) = await workers(0), await workers(1)
    for metrics in (first, second):
        for version in range(900, 1000, 10):
            reward(metrics, version)
        metrics.reward_windows.announced = lambda: {"default": (0, "2")}
    reward(first, 2)

    assert windows_of((await totals.exposition()).decode()) == {0: 1, 10: 0}
