"""The one writer of steps."""

import asyncio
import os
import threading
from array import array

import pytest
from forests import make_step
from prometheus_client import CollectorRegistry
from stored import rollout_of, some_steps, steps_of, undelivered_of

from proxy.clock import SystemClock
from proxy.errors import StoreFault
from proxy.metrics import make_metrics
from proxy.recorder import Recorder
from proxy.spool import Spool


@pytest.fixture
async def birth(store):
    return (await store.open("r1", {}, now_ms=1)).birth


@pytest.fixture
async def recorder(store):
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock())
    yield recorder
    await recorder.close()


def step(number=1, prompt=(1, 2, 3), **named):
    return make_step(f"S{number:03}", prompt, (7, 8), rollout_id="r1", **named)


async def test_a_recorded_step_is_there_with_its_counts(recorder, store, birth):
    """When record returns, the step can be read, and the rollout counts it."""
    await recorder.record(step(), birth, body_bytes=10)

    (kept,) = await steps_of(store, "r1")
    assert array("i", [7, 8]) == kept.choices[0].ids
    assert {"steps": 1, "exact": 1, "sampled_tokens": 2, "prompt_tokens": 3} == (await rollout_of(store, "r1")).counts
    assert kept.timing.stored is not None


async def test_what_steps_share_is_sent_once(recorder, store, birth):
    """Fifty turns over one growing prompt store its blocks once."""
    prompt = list(range(5_000))
    for number in range(50):
        await recorder.record(step(number, prompt), birth, body_bytes=10)

    assert 5_000 // 256 == len(await store.blocks("r1"))
    assert all(array("i", prompt) == kept.prompts[0] for kept in await steps_of(store, "r1"))


async def test_blocks_that_the_store_lost_are_sent_again(recorder, store, birth):
    """A record never leans on what is not there."""
    prompt = list(range(5_000))
    await recorder.record(step(1, prompt), birth, body_bytes=10)
    real = store._store
    for server in await real._servers.all():
        keys = (await server.ask([("KEYS", "*blocks*")]))[0]
        await server.ask([("DEL", *keys)])
    await recorder.record(step(2, prompt), birth, body_bytes=10)

    assert 5_000 // 256 == len(await store.blocks("r1"))


async def test_a_large_step_is_encoded_beside_the_event_loop(recorder, store, birth):
    """It arrives as any other."""
    await recorder.record(step(1, range(300_000)), birth, body_bytes=2_000_000)

    assert 300_000 == len((await steps_of(store, "r1"))[0].prompts[0])


async def test_a_failing_store_is_told_to_the_caller(recorder, store, birth):
    """StoreFault, and nothing is half-written."""
    store.failing.add("append")
    with pytest.raises(StoreFault, match="could not be stored"):
        await recorder.record(step(), birth, body_bytes=10)

    assert [] == await steps_of(store, "r1")


async def test_a_step_of_a_deleted_rollout_is_let_go(recorder, store, birth):
    """Calls in flight end, and store nothing."""
    await store.drop("r1")
    await recorder.record(step(), birth, body_bytes=10)

    assert await store.look("r1") is None


async def test_a_step_of_an_earlier_life_does_not_enter_the_next(recorder, store, birth):
    """The same id opened again is another rollout."""
    await store.drop("r1")
    await store.open("r1", {}, now_ms=2)
    await recorder.record(step(), birth, body_bytes=10)

    assert [] == await steps_of(store, "r1")


async def test_close_waits_for_steps_that_nobody_waits_for(recorder, store, birth):
    """A partial step of a client that left is not lost at the stop."""
    store.waiting["append"] = asyncio.Event()
    recorder.keep(step(), birth, body_bytes=10)
    closing = asyncio.ensure_future(recorder.close())
    store.waiting["append"].set()
    await closing

    assert 1 == len(await steps_of(store, "r1"))


async def test_a_caller_that_is_cancelled_leaves_its_step_marked(recorder, store, birth):
    """The step is stored all the same, and said to be undelivered."""
    store.waiting["append"] = asyncio.Event()
    store.reached["append"] = asyncio.Event()
    recording = asyncio.ensure_future(recorder.record(step(), birth, body_bytes=10))
    await store.reached["append"].wait()
    recording.cancel()
    store.waiting["append"].set()

    assert {"S001"} == await undelivered_of(store, "r1")
    assert 1 == len(await steps_of(store, "r1"))


async def test_a_response_that_cannot_be_written_costs_the_response_and_not_the_step(recorder, store, birth):
    """What no JSON can carry is left out, and the step is flagged."""
    deep: list = []
    for _ in range(300):
        deep = [deep]
    await recorder.record(step(response={"choices": [], "x": deep}), birth, body_bytes=10)

    (kept,) = await steps_of(store, "r1")
    assert (None, True) == (kept.response, "unparsed_event" in kept.problems)
    assert array("i", [7, 8]) == kept.choices[0].ids


async def test_with_a_journal_steps_wait_in_it_while_the_store_is_away(store, birth, tmp_path):
    """Each is durable when record returns; when the store is back, all are there, in order, once."""
    spool = Spool(tmp_path / "spool")
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), spool=spool)
    await recorder.record(step(0), birth, body_bytes=10)
    store.failing |= {"append", "constant"}
    for number in range(1, 5):
        await recorder.record(step(number, range(1000)), birth, body_bytes=10)
    waiting, there = spool.pending, await steps_of(store, "r1")
    store.failing.clear()
    async with asyncio.timeout(50):
        while spool.pending:
            await asyncio.sleep(0.01)
    await recorder.record(step(5), birth, body_bytes=10)
    await recorder.close()

    assert (4, 1) == (waiting, len(there))
    assert [f"S{number:03}" for number in range(6)] == [kept.step_id for kept in await steps_of(store, "r1")]


async def test_what_a_journal_holds_at_the_start_is_stored(store, birth, tmp_path):
    """A process that ended while the store was away leaves it to the next one."""
    store.failing |= {"append", "constant"}
    first = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), spool=Spool(tmp_path / "spool"))
    await first.record(step(1), birth, body_bytes=10)
    await first.close()
    store.failing.clear()
    second = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), spool=Spool(tmp_path / "spool"))
    (kept,) = await some_steps(store, "r1")
    await second.close()

    assert "S001" == kept.step_id


async def test_a_step_that_is_being_written_to_the_journal_while_the_store_returns_is_stored(
    store, birth, tmp_path, monkeypatch
):
    """The journal was empty when it was replayed: it is replayed once more."""
    spool, writing, written = Spool(tmp_path / "spool"), threading.Event(), threading.Event()
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), spool=spool)
    store.failing |= {"append", "constant"}

    def slow(file: int) -> None:
        writing.set()
        assert written.wait(50)

    monkeypatch.setattr(os, "fsync", slow)
    recording = asyncio.ensure_future(recorder.record(step(1), birth, body_bytes=10))
    await asyncio.to_thread(writing.wait, 50)
    store.failing.clear()
    async with asyncio.timeout(50):
        while recorder.standing.away is not None:
            await asyncio.sleep(0.01)
    written.set()
    await recording
    (kept,) = await some_steps(store, "r1")
    await recorder.close()

    assert "S001" == kept.step_id


async def test_with_a_journal_what_is_undelivered_is_noted_while_the_store_is_away(store, birth, tmp_path):
    """The mark waits in the journal behind its step."""
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), spool=Spool(tmp_path / "spool"))
    store.failing |= {"append", "constant", "mark"}
    await recorder.record(step(1), birth, body_bytes=10)
    recorder.undelivered(step(1), birth)
    async with asyncio.timeout(50):
        while recorder.spooled != 2:
            await asyncio.sleep(0.01)
    store.failing.clear()

    assert {"S001"} == await undelivered_of(store, "r1")
    assert 1 == len(await steps_of(store, "r1"))
    await recorder.close()


async def test_without_a_journal_a_mark_that_cannot_be_set_takes_nothing_with_it(recorder, store, birth):
    """It is lost, and the step stays."""
    await recorder.record(step(1), birth, body_bytes=10)
    store.failing |= {"mark"}
    recorder.undelivered(step(1), birth)
    await recorder.close()

    assert 1 == len(await steps_of(store, "r1"))
    assert {} == await store.marks("r1")


async def test_a_step_that_neither_store_nor_journal_takes_is_told_to_nobody(store, birth, tmp_path, monkeypatch):
    """Its caller is told so; those that the journal took are there in order when the store is back."""
    spool = Spool(tmp_path / "spool")
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), spool=spool)
    store.failing |= {"append", "constant"}
    await recorder.record(step(1), birth, body_bytes=10)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StoreFault, match="nor in the journal"):
            await recorder.record(step(2), birth, body_bytes=10)
    await recorder.record(step(3), birth, body_bytes=10)
    store.failing.clear()
    there = [kept.step_id for kept in await some_steps(store, "r1", 2)]
    await recorder.close()

    assert ["S001", "S003"] == there
