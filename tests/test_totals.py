"""The metrics of all workers together."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry, Gauge

from proxy import totals
from proxy.metrics import make_metrics
from proxy.totals import Crew, Totals


@pytest.fixture
async def workers(tmp_path):
    """Starts workers by number: the metrics of each, and what gives the total."""
    started = []

    async def workers(number):
        registry = CollectorRegistry()
        metrics = make_metrics(registry)
        one = Totals(registry, metrics, Crew(number, tmp_path))
        await one.start()
        started.append(one)
        return metrics, one

    yield workers
    for one in started:
        await one.close()


async def value_of(totals, line):
    """The value on a line of what Prometheus is told."""
    (value,) = re.findall(rf"^{re.escape(line)} (\S+)$", (await totals.exposition()).decode(), re.MULTILINE)
    return float(value)


async def test_any_worker_tells_the_sum_over_all(workers):
    """Of counters by their labels, of histograms by their buckets, of gauges; whoever is asked, and however often."""
    told = [await workers(number) for number in range(3)]
    for number, (metrics, _) in enumerate(told):
        metrics.calls.labels("chat", "e", "200").inc(number + 1)
        metrics.duration.labels("chat").observe(0.02 * number)
        metrics.in_flight.set(2)

    for _ in range(2):
        for _, any_of_them in told:
            assert 6 == await value_of(any_of_them, 'tokentape_calls_total{dialect="chat",engine="e",status="200"}')
            assert 2 == await value_of(any_of_them, 'tokentape_call_seconds_bucket{dialect="chat",le="0.025"}')
            assert 3 == await value_of(any_of_them, 'tokentape_call_seconds_count{dialect="chat"}')
            assert 6 == await value_of(any_of_them, "tokentape_calls_in_flight")
            assert 3 == await value_of(any_of_them, "tokentape_workers")


async def test_of_states_the_largest_counts_and_of_births_the_first(workers):
    """Two workers that know the store to be away do not make it away twice."""
    (one, totals), (other, _) = await workers(0), await workers(1)
    one.store_away.set(1)
    other.store_away.set(1)
    born = await value_of(totals, "tokentape_undelivered_created")

    assert 1 == await value_of(totals, "tokentape_store_away")
    assert abs(born - one.undelivered._created) < 1


async def test_a_replaced_worker_goes_on_counting_where_it_was_last_heard(workers):
    """A sum that falls by a part would look to Prometheus as if all had been counted anew; how it stood is over."""
    (one, totals), (other, dead) = await workers(0), await workers(1)
    one.undelivered.inc(1)
    other.undelivered.inc(10)
    other.in_flight.set(5)
    counts = [await value_of(totals, "tokentape_undelivered_total")]
    await dead.close()
    counts.append(await value_of(totals, "tokentape_undelivered_total"))
    flying = await value_of(totals, "tokentape_calls_in_flight")
    new, _ = await workers(1)
    new.undelivered.inc(100)
    counts += [await value_of(totals, "tokentape_undelivered_total") for _ in range(2)]
    new, last = await workers(1)
    counts.append(await value_of(last, "tokentape_undelivered_total"))

    assert [11, 11, 111, 111, 111] == counts
    assert 0 == flying
    assert 2 == await value_of(totals, "tokentape_workers_left_out_total")


async def test_a_worker_that_does_not_answer_is_left_out_and_counted(workers, tmp_path, monkeypatch):
    """Who asks is answered all the same, within about a second."""
    monkeypatch.setattr(totals, "_PATIENCE_S", 0.05)
    metrics, asked = await workers(0)
    metrics.undelivered.inc(3)
    over = asyncio.Event()

    async def say_nothing(_, writer):
        await over.wait()
        writer.close()

    silent = await asyncio.start_unix_server(say_nothing, tmp_path / "1.sock")

    assert 3 == await value_of(asked, "tokentape_undelivered_total")
    assert 1 == await value_of(asked, "tokentape_workers")
    assert 3 == await value_of(asked, "tokentape_workers_left_out_total")
    over.set()
    silent.close()


async def test_a_worker_that_is_only_slow_does_not_look_like_a_new_one(tmp_path):
    """The last start of all is the youngest worker's, whether it answers or not: each change of it is a start."""
    started = []
    for number, second in ((0, 100.0), (1, 200.0)):
        registry = CollectorRegistry()
        Gauge("process_start_time_seconds", "When it started.", registry=registry).set(second)
        one = Totals(registry, make_metrics(CollectorRegistry()), Crew(number, tmp_path))
        await one.start()
        started.append(one)
    asked, youngest = started
    before = await value_of(asked, "process_start_time_seconds")
    await youngest.close()

    assert (200, 200) == (before, await value_of(asked, "process_start_time_seconds"))
    await asked.close()


async def test_a_process_alone_tells_its_own(tmp_path):
    """And is one."""
    registry = CollectorRegistry()
    make_metrics(registry).undelivered.inc()
    alone = Totals(registry, make_metrics(CollectorRegistry()))
    await alone.start()

    assert 1 == await value_of(alone, "tokentape_undelivered_total")
    assert 1 == await value_of(alone, "tokentape_workers")
    await alone.close()


def without_process_values(exposition: bytes) -> list[bytes]:
    """The lines of an exposition. Of those about the process (CPU time, memory) only the name: they change at any time."""
    return [line.split()[0] if line.startswith(b"process_") else line for line in exposition.splitlines()]


async def test_a_dashboard_cannot_tell_one_process_from_several(tmp_path):
    """Names, kinds, sentences and labels are those that a process alone tells, and in its order."""
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    metrics.calls.labels("chat", 'a "quoted" name\n', "200").inc()
    one = Totals(registry, metrics, Crew(0, tmp_path))

    alone = await Totals(registry, metrics).exposition()
    assert without_process_values(alone) == without_process_values(await one.exposition())
