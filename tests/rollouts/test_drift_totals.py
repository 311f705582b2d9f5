"""The totals of drift of a finished rollout: each of its steps is in them, whenever it was stored and whoever died."""

import asyncio

import orjson
import pytest
from drifting_engine import ASK, MORE, REPLY, Drifting, DriftingEngine, same
from fakes import proxying

from proxy.rollouts.drift_report import DriftReporter


@pytest.fixture
def drifting(engine):
    """An engine whose second prompt is what it sampled in other tokens."""
    made = DriftingEngine(engine)
    made.detokenize = same
    return made


async def finish_unseen(store) -> None:
    """Finish the rollout as a process does that dies before it counts."""
    fields = {"status": b'"completed"', "finished_ms": b"1"}
    await store.update_if("r1", fields, expect={"status": None}, now_ms=1)


async def test_a_late_step_is_counted(store, engine, drifting, http):
    """A call that was in flight at the finish may drift as any other: the totals have it, and so have the metrics."""
    respond, hold = engine.respond, asyncio.Event()

    async def held(request, body):
        if len(body.get("messages", ())) > 1:
            await hold.wait()
        return await respond(request, body)

    engine.respond = held
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.chat(ASK)
        late = asyncio.create_task(rollout.chat(ASK, REPLY, MORE))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.005)
        await rollout.finish()
        await rollout.counted()
        hold.set()
        await late
        await rollout.counted(retokenized=1)

        assert 1 == (await rollout.get())["counts"]["late"]
        assert 1 == await rollout.metric("retokenized")


@pytest.mark.parametrize("path", ["", "/tree"])
async def test_what_a_process_died_before_it_counted_is_counted_on_a_look(store, drifting, http, path):
    """At the rollout or its tree, once."""
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await finish_unseen(store)
        await rollout.get(path)
        await rollout.counted(retokenized=1)
        await rollout.get(path)

        assert 1 == await rollout.metric("retokenized")


async def test_a_finish_that_is_repeated_counts_what_was_not_counted(store, drifting, http):
    """A client that heard no answer finishes once more."""
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await finish_unseen(store)
        await rollout.finish()
        while "drift" not in (await store.get("r1")).fields:
            await asyncio.sleep(0.005)

        assert {"kinds": {"retokenized": 1}, "steps": 2} == orjson.loads((await store.get("r1")).fields["drift"])


async def test_a_rollout_that_is_open_has_no_totals(store, drifting, http):
    """Nobody looks through all of its steps at each look."""
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await rollout.boundary()

        assert (await rollout.get())["drift"] is None
        assert "drift" not in (await store.get("r1")).fields


async def test_a_store_that_fails_is_named_in_the_log(store, drifting, http, caplog):
    """The totals stay unknown, and the next look counts them."""
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        store.failing.add("read_all")
        await rollout.finish()
        while "Drift not counted" not in caplog.text:
            await asyncio.sleep(0.005)
        store.failing.clear()
        await rollout.counted(retokenized=1)


async def test_many_late_steps_do_not_each_have_the_rollout_read(store, engine, drifting, http, monkeypatch):
    """Each count reads all steps: what is stored while one is under way, or soon after, is left to the next look."""
    counts = []

    find = DriftReporter.find

    async def counted(reporter, *args, **named):
        counts.append(args)
        return await find(reporter, *args, **named)

    monkeypatch.setattr(DriftReporter, "find", counted)
    monkeypatch.setattr("proxy.rollouts.drift_totals._MIN_PAUSE_S", 600.0)
    respond, hold = engine.respond, asyncio.Event()

    async def held(request, body):
        await hold.wait()
        return await respond(request, body)

    engine.respond = held
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        late = [asyncio.create_task(rollout.chat({"role": "user", "content": str(n)})) for n in range(20)]
        while len(engine.requests) < 20:
            await asyncio.sleep(0.005)
        await rollout.finish()
        hold.set()
        await asyncio.gather(*late)

    assert len(counts) <= 2
