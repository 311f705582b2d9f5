"""The drift totals of finished rollouts include every step, also after crashes."""

import asyncio

import orjson
import pytest
from tests.support.drifting_engine import ASK, MORE, REPLY, DriftingEngine, same

from proxy.rollouts.drift import Coalescer, DriftReporter


@pytest.fixture
def drifting(engine):
    """An engine that renders the sampled reply as other tokens in the second prompt."""
    drifting_engine = DriftingEngine(engine)
    drifting_engine.detokenize = same
    return drifting_engine


async def finish_without_counting(store) -> None:
    """Finish the rollout like a process that crashes before it counts."""
    fields = {"status": b'"completed"', "finished_ms": b"1"}
    await store.update_if("r1", fields, expect={"status": None}, now_ms=1)


async def test_the_drift_of_a_late_step_is_counted(rollout, engine):
    respond, hold = engine.respond, asyncio.Event()

    async def respond_later(request, body):
        if len(body.get("messages", ())) > 1:
            await hold.wait()
        return await respond(request, body)

    engine.respond = respond_later
    await rollout.chat(ASK)
    late = asyncio.create_task(rollout.chat(ASK, REPLY, MORE))
    while len(engine.requests) < 2:
        await asyncio.sleep(0.005)
    await rollout.finish()
    await rollout.counted()
    hold.set()
    await late
    await rollout.counted(retokenized=1)

    assert (await rollout.get())["counts"]["late"] == 1
    assert await rollout.metric("retokenized") == 1


@pytest.mark.parametrize("path", ["", "/tree"])
async def test_reading_the_rollout_or_its_tree_counts_drift_after_a_crash(rollout, store, path):
    await rollout.two_turns()
    await finish_without_counting(store)
    await rollout.get(path)
    await rollout.counted(retokenized=1)
    await rollout.get(path)

    assert await rollout.metric("retokenized") == 1


async def test_a_repeated_finish_counts_drift_after_a_crash(rollout, store):
    await rollout.two_turns()
    await finish_without_counting(store)
    await rollout.finish()
    while "drift" not in (await store.get("r1")).fields:
        await asyncio.sleep(0.005)

    assert orjson.loads((await store.get("r1")).fields["drift"]) == {"kinds": {"retokenized": 1}, "steps": 2}


async def test_an_open_rollout_has_no_drift_totals(rollout, store):
    await rollout.two_turns()
    await rollout.boundary()

    assert (await rollout.get())["drift"] is None
    assert "drift" not in (await store.get("r1")).fields


async def test_a_store_failure_while_counting_is_logged(rollout, store, caplog):
    """The next read counts."""
    await rollout.two_turns()
    store.failing.add("read_all")
    await rollout.finish()
    while "Drift not counted" not in caplog.text:
        await asyncio.sleep(0.005)
    store.failing.clear()
    await rollout.counted(retokenized=1)


async def test_many_late_steps_do_not_read_the_rollout_once_each(rollout, engine, monkeypatch):
    """Counts during a count, or shortly after one, are coalesced."""
    counts = []

    find = DriftReporter.find

    async def counted(reporter, *args, **named):
        counts.append(args)
        return await find(reporter, *args, **named)

    monkeypatch.setattr(DriftReporter, "find", counted)
    monkeypatch.setattr("proxy.rollouts.drift._MIN_PAUSE_S", 600.0)
    respond, hold = engine.respond, asyncio.Event()

    async def respond_later(request, body):
        await hold.wait()
        return await respond(request, body)

    engine.respond = respond_later
    late = [asyncio.create_task(rollout.chat({"role": "user", "content": str(n)})) for n in range(20)]
    while len(engine.requests) < 20:
        await asyncio.sleep(0.005)
    await rollout.finish()
    hold.set()
    await asyncio.gather(*late)

    assert len(counts) <= 2


class Work:
    """Count the runs; each waits for the gate."""

    def __init__(self) -> None:
        self.times = 0
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def __call__(self) -> None:
        self.times += 1
        self.begun.set()
        await self.gate.wait()


async def test_work_requested_while_it_runs_runs_once_more():
    """A running one may have read older data; the requests do not wait."""
    coalescer, work = Coalescer(), Work()
    task = asyncio.create_task(coalescer.run("a", work))
    await work.begun.wait()
    for _ in range(3):
        await coalescer.run("a", work)
    assert (work.times, coalescer.is_recent("a")) == (1, True)
    work.gate.set()
    await task

    assert work.times == 2


async def test_work_of_different_names_runs_concurrently():
    coalescer, first, second = Coalescer(), Work(), Work()
    second.gate.set()
    task = asyncio.create_task(coalescer.run("a", first))
    await first.begun.wait()
    await coalescer.run("b", second)
    first.gate.set()
    await task

    assert second.times == 1
    assert not coalescer.is_recent("c")


async def test_work_is_recent_for_a_time_after_it_ran(monkeypatch):
    """The number of remembered names is limited."""
    monkeypatch.setattr("proxy.rollouts.drift._MAX_REMEMBERED", 1)
    coalescer, work = Coalescer(), Work()
    work.gate.set()
    await coalescer.run("a", work)
    assert coalescer.is_recent("a")
    await coalescer.run("b", work)

    assert (coalescer.is_recent("a"), coalescer.is_recent("b")) == (False, True)


async def test_failed_work_raises_and_can_be_repeated():
    coalescer = Coalescer()

    async def fails() -> None:
        raise ValueError("so")

    for _ in range(2):
        with pytest.raises(ValueError, match="so"):
            await coalescer.run("a", fails)
