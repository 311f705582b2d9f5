"""The recorder appends each step to the store once, and journals it while the store is unreachable."""

import asyncio
import os
import threading
from array import array
from secrets import token_hex
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry
from tests.support.fakes import FailingStore
from tests.support.forests import make_step
from tests.support.stored import stored_rollout, stored_steps, wait_for_steps, wait_for_undelivered

from proxy.clock import SystemClock
from proxy.errors import StoreUnavailable
from proxy.rollouts.outages import Journal
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.rollout import LiveRollout, read_marks, read_rollout, write_fields
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.blocks import UNIT_BYTES, BlockReader, BlockWriter
from proxy.trajectory.step import Timing
from storage import StoreOptions, open_store
from storage.types import StepWrite


async def opened(store, **fields) -> LiveRollout:
    """Open the rollout r1."""
    return LiveRollout(read_rollout(await store.open("r1", write_fields(fields), now_ms=1)))


@pytest.fixture
async def live(store):
    return await opened(store)


@pytest.fixture
def incarnation(live):
    return live.rollout.incarnation


@pytest.fixture
async def recorder(store):
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock())
    yield recorder
    await recorder.close()


def step(number=1, prompt=(1, 2, 3), **named):
    return make_step(f"S{number:03}", prompt, (7, 8), rollout_id="r1", **named)


async def test_a_recorded_step_is_stored_with_its_counts(recorder, store, live):
    """When record returns, the step can be read and the rollout counts it."""
    await recorder.record(step(), live, body_bytes=10, work_bytes=10)

    (kept,) = await stored_steps(store, "r1")
    assert kept.choices[0].ids == array("i", [7, 8])
    assert (await stored_rollout(store, "r1")).counts == {
        "steps": 1,
        "exact": 1,
        "sampled_tokens": 2,
        "prompt_tokens": 3,
    }
    assert kept.timing.stored is not None


@pytest.mark.parametrize(
    ("usage", "extra", "counted"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 2}}, {"cached_tokens": 1}, 2),
        ({"prompt_tokens_details": None}, {"cached_tokens": 1}, 1),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, {}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 4}}, {}, None),
        ({"prompt_tokens_details": {"cached_tokens": True}}, {}, None),
        ({"prompt_tokens_details": [2]}, {}, None),
        (None, {}, None),
    ],
)
async def test_cached_prompt_tokens_are_counted_if_the_engine_reports_them(
    recorder, store, live, usage, extra, counted
):
    """More than the prompt has, or no number, is not counted."""
    recorded = step(usage=usage, extra=extra)
    await recorder.record(recorded, live, body_bytes=10, work_bytes=10)

    assert counted == recorded.cached_tokens == (await stored_rollout(store, "r1")).counts.get("cached_tokens")
    counter = recorder._metrics.cached_prompt_tokens.labels(recorded.engine.name)
    assert (counted or 0) == counter._value.get()


USER = {"role": "user", "content": [{"type": "text", "text": "  What is\n17 times 23? " + "x" * 500}]}


@pytest.mark.parametrize(
    ("request_body", "task"),
    [
        ({"messages": [{"role": "system", "content": "Be brief."}, USER]}, ("What is 17 times 23? " + "x" * 120)[:120]),
        ({"prompt": "Complete this"}, "Complete this"),
        ({"input": "A question"}, "A question"),
        ({"messages": [7, {"role": "user"}, {"role": "user", "content": {}}], "prompt": 3}, None),
    ],
)
async def test_the_first_step_sets_the_first_words_of_the_task(recorder, store, live, request_body, task):
    """Later ones do not change them, also those that another process records as its first."""
    other = Recorder(store, make_metrics(CollectorRegistry()), SystemClock())
    await recorder.record(step(1, request=request_body, timing=Timing(5.0)), live, body_bytes=10, work_bytes=10)
    await recorder.record(step(2, request={"prompt": "later"}), live, body_bytes=10, work_bytes=10)
    if task is not None:
        await other.record(step(3, request={"prompt": "of another process"}), live, body_bytes=10, work_bytes=10)
    rollout = await stored_rollout(store, "r1")

    assert (rollout.task, rollout.began_ms) == (task, 5000)


async def test_failed_calls_are_counted_by_http_status(recorder, store, live):
    """A call without a response has no status."""
    for number, response in enumerate([{"status": 400}, {"status": 503}, {"status": 400}, None]):
        failed = make_step(f"S{number}", (), rollout_id="r1", status="error", response=response)
        await recorder.record(failed, live, body_bytes=10, work_bytes=10)
    rollout = await stored_rollout(store, "r1")

    assert rollout.errors == {"400": 2, "503": 1}
    assert rollout.counts["error"] == 4


def runs_of(blocks):
    """The numbers of units of these blocks."""
    return [len(link.piece) // UNIT_BYTES for link in (BlockReader(blocks).link(name) for name in blocks)]


async def test_shared_blocks_are_sent_once(recorder, store, live):
    """Fifty turns over one growing prompt store its blocks once."""
    prompt = list(range(5_000))
    for number in range(50):
        await recorder.record(step(number, prompt), live, body_bytes=10, work_bytes=10)

    assert runs_of(await store.blocks("r1")) == [16, 2, 1]
    assert all(array("i", prompt) == kept.prompts[0] for kept in await stored_steps(store, "r1"))


async def test_first_calls_at_once_compress_their_common_prompt_once(recorder, store, live):
    """In threads, as each is large; each sends all blocks, as none is stored yet."""
    prompt, compressed = list(range(128_000)), []
    compress = BlockWriter.compress
    with patch.object(
        BlockWriter, "compress", lambda writer, raw: compressed.append(len(raw)) or compress(writer, raw)
    ):
        await asyncio.gather(
            *(recorder.record(step(number, prompt), live, body_bytes=2**20, work_bytes=2**20) for number in range(10))
        )

    assert sum(size >= 4 * UNIT_BYTES for size in compressed) == 32
    assert sum(runs_of(await store.blocks("r1"))) == 500


async def test_blocks_that_the_store_lost_are_sent_again(recorder, store, live):
    """Every block that a record requires is stored."""
    prompt = list(range(5_000))
    await recorder.record(step(1, prompt), live, body_bytes=10, work_bytes=10)
    real = store._store
    for server in await real._servers.all():
        keys = (await server.execute(b"", [("KEYS", "*blocks*")]))[0]
        await server.execute(b"", [("DEL", *keys)])
    await recorder.record(step(2, prompt), live, body_bytes=10, work_bytes=10)

    assert runs_of(await store.blocks("r1")) == [16, 2, 1]


async def test_a_large_step_is_encoded_in_a_thread(recorder, store, live):
    await recorder.record(step(1, range(300_000)), live, body_bytes=2_000_000, work_bytes=2_000_000)

    assert len((await stored_steps(store, "r1"))[0].prompts[0]) == 300_000


async def test_a_store_failure_raises_store_unavailable(recorder, store, live):
    """No part of the step is stored."""
    store.failing.add("append")
    with pytest.raises(StoreUnavailable, match="could not be stored"):
        await recorder.record(step(), live, body_bytes=10, work_bytes=10)

    assert await stored_steps(store, "r1") == []


async def test_a_step_of_a_deleted_rollout_is_discarded(recorder, store, live):
    await store.delete("r1")
    await recorder.record(step(), live, body_bytes=10, work_bytes=10)

    assert await store.get("r1") is None


async def test_a_step_of_an_earlier_live_is_not_stored_in_the_next(recorder, store, live):
    """A rollout with the same ID that is created after a deletion is another rollout."""
    await store.delete("r1")
    await store.open("r1", {}, now_ms=2)
    await recorder.record(step(), live, body_bytes=10, work_bytes=10)

    assert await stored_steps(store, "r1") == []


async def test_close_waits_for_detached_steps(recorder, store, live):
    """A partial step of a disconnected client is not lost at shutdown."""
    store.waiting["append"] = asyncio.Event()
    recorder.record_detached(step(), live, body_bytes=10)
    closing = asyncio.ensure_future(recorder.close())
    store.waiting["append"].set()
    await closing

    assert len(await stored_steps(store, "r1")) == 1


async def test_the_step_of_a_cancelled_caller_is_stored_and_marked_undelivered(recorder, store, live):
    """The step is written after the cancellation."""
    store.waiting["append"] = asyncio.Event()
    store.reached["append"] = asyncio.Event()
    recording = asyncio.ensure_future(recorder.record(step(), live, body_bytes=10, work_bytes=10))
    await store.reached["append"].wait()
    recording.cancel()
    store.waiting["append"].set()

    assert await wait_for_undelivered(store, "r1") == {"S001"}
    assert len(await stored_steps(store, "r1")) == 1


async def test_a_caller_that_is_cancelled_at_any_time_has_one_step(recorder, store, live):
    """This includes a step that the store has already, if the recorder did not receive the store's reply."""
    for turns in range(1, 60):
        recording = asyncio.ensure_future(recorder.record(step(turns), live, body_bytes=10, work_bytes=10))
        for _ in range(turns):
            await asyncio.sleep(0)
        recording.cancel()
        await asyncio.wait([recording])
    await recorder.close()

    assert [f"S{number:03}" for number in range(1, 60)] == sorted(
        kept.step_id for kept in await stored_steps(store, "r1")
    )
    assert (await stored_rollout(store, "r1")).counts["steps"] == 59
    assert sum(sample.value for family in recorder._metrics.steps.collect() for sample in family.samples) == 59


async def test_a_response_that_cannot_be_encoded_is_omitted_from_its_step(recorder, store, live):
    """Values that JSON cannot represent are omitted, and the step is flagged."""
    deep: list = []
    for _ in range(300):
        deep = [deep]
    await recorder.record(step(response={"choices": [], "x": deep}), live, body_bytes=10, work_bytes=10)

    (kept,) = await stored_steps(store, "r1")
    assert (kept.response, "unparsed_event" in kept.problems) == (None, True)
    assert kept.choices[0].ids == array("i", [7, 8])


@pytest.mark.parametrize("field", ["request", "sent", "usage", "sampling", "extra"])
async def test_a_step_keeps_its_tokens_whichever_field_cannot_be_encoded(recorder, store, live, field):
    """The JSON of client and engine is omitted instead of token ids."""
    await recorder.record(step(**{field: {"set": {"x": object()}}}), live, body_bytes=10, work_bytes=10)

    (kept,) = await stored_steps(store, "r1")
    assert "unparsed_event" in kept.problems
    assert (array("i", [7, 8]), array("i", [1, 2, 3])) == (kept.choices[0].ids, kept.prompts[0])


async def test_steps_are_journaled_while_the_store_is_unreachable(store, live, tmp_path):
    """Each is durable when record returns; afterwards the store has all of them once, in order."""
    journal = Journal(tmp_path / "spool")
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=journal)
    await recorder.record(step(0), live, body_bytes=10, work_bytes=10)
    store.failing |= {"append", "probe"}
    for number in range(1, 5):
        await recorder.record(step(number, range(1000)), live, body_bytes=10, work_bytes=10)
    waiting, there = journal.pending, await stored_steps(store, "r1")
    store.failing.clear()
    async with asyncio.timeout(50):
        while journal.pending:
            await asyncio.sleep(0.01)
    await recorder.record(step(5), live, body_bytes=10, work_bytes=10)
    await recorder.close()

    assert (waiting, len(there)) == (4, 1)
    assert [f"S{number:03}" for number in range(6)] == [kept.step_id for kept in await stored_steps(store, "r1")]


async def test_entries_of_the_journal_are_stored_at_the_start(store, live, tmp_path):
    """The next process stores the steps of one that ended while the store was unreachable."""
    store.failing |= {"append", "probe"}
    first = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=Journal(tmp_path / "spool"))
    await first.record(step(1), live, body_bytes=10, work_bytes=10)
    await first.close()
    store.failing.clear()
    second = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=Journal(tmp_path / "spool"))
    (kept,) = await wait_for_steps(store, "r1")
    await second.close()

    assert kept.step_id == "S001"


async def test_a_step_that_is_being_written_to_the_journal_while_the_store_returns_is_stored(
    store, live, tmp_path, monkeypatch
):
    """The journal was empty when it was replayed, so it is replayed once more."""
    journal, writing, written = Journal(tmp_path / "spool"), threading.Event(), threading.Event()
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=journal)
    store.failing |= {"append", "probe"}

    def slow(file: int) -> None:
        writing.set()
        assert written.wait(50)

    monkeypatch.setattr(os, "fsync", slow)
    recording = asyncio.ensure_future(recorder.record(step(1), live, body_bytes=10, work_bytes=10))
    await asyncio.to_thread(writing.wait, 50)
    store.failing.clear()
    async with asyncio.timeout(50):
        while recorder.store_health.unreachable:
            await asyncio.sleep(0.01)
    written.set()
    await recording
    (kept,) = await wait_for_steps(store, "r1")
    await recorder.close()

    assert kept.step_id == "S001"


async def test_undelivered_marks_are_journaled_while_the_store_is_unreachable(store, live, incarnation, tmp_path):
    """The mark is in the journal after its step."""
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=Journal(tmp_path / "spool"))
    store.failing |= {"append", "probe", "mark"}
    await recorder.record(step(1), live, body_bytes=10, work_bytes=10)
    recorder.mark_undelivered(step(1), incarnation)
    async with asyncio.timeout(50):
        while recorder.journaled != 2:
            await asyncio.sleep(0.01)
    store.failing.clear()

    assert await wait_for_undelivered(store, "r1") == {"S001"}
    assert len(await stored_steps(store, "r1")) == 1
    await recorder.close()


async def test_without_a_journal_a_failed_mark_is_lost_and_the_step_remains(recorder, store, live, incarnation):
    await recorder.record(step(1), live, body_bytes=10, work_bytes=10)
    store.failing |= {"mark"}
    recorder.mark_undelivered(step(1), incarnation)
    await recorder.close()

    assert len(await stored_steps(store, "r1")) == 1
    assert await store.marks("r1") == {}


async def test_a_step_that_can_be_written_neither_to_the_store_nor_to_the_journal_is_an_error(
    store, live, tmp_path, monkeypatch
):
    """record raises StoreUnavailable; steps that were journaled are stored later, in order."""
    journal = Journal(tmp_path / "spool")
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=journal)
    store.failing |= {"append", "probe"}
    await recorder.record(step(1), live, body_bytes=10, work_bytes=10)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StoreUnavailable, match="nor in the journal"):
            await recorder.record(step(2), live, body_bytes=10, work_bytes=10)
    await recorder.record(step(3), live, body_bytes=10, work_bytes=10)
    store.failing.clear()
    there = [kept.step_id for kept in await wait_for_steps(store, "r1", 2)]
    await recorder.close()

    assert there == ["S001", "S003"]


async def finish(store, finished_ms, **more):
    """Finish a rollout, as another process does."""
    fields = write_fields({"status": "completed", "finished_ms": finished_ms, **more})
    await store.update_if("r1", fields, expect={}, now_ms=1)


async def late_of(store):
    return read_marks(await store.marks("r1")).late


async def test_a_step_that_ends_after_its_rollout_was_finished_is_late(store, live):
    """It is stored, marked and counted; those before it are not late."""
    metrics = make_metrics(CollectorRegistry())
    recorder = Recorder(store, metrics, SystemClock())
    await recorder.record(step(1), live, body_bytes=10, work_bytes=10)
    await finish(store, 5)
    await recorder.record(step(2), live, body_bytes=10, work_bytes=10)
    recorder.record_detached(step(3, status="partial"), live, body_bytes=10)
    await recorder.close()

    assert await late_of(store) == {"S002", "S003"}
    assert (len(await stored_steps(store, "r1")), (await stored_rollout(store, "r1")).counts["late"]) == (3, 2)
    assert metrics.late_steps._value.get() == 2


async def test_a_rollout_that_reached_a_limit_is_not_finished(recorder, store, live):
    """Its steps in flight are not late."""
    await store.update_if("r1", write_fields({"status": "limited"}), expect={}, now_ms=1)
    await recorder.record(step(1), live, body_bytes=10, work_bytes=10)

    assert await late_of(store) == frozenset()


async def journaled(store, live, tmp_path, number=1):
    """Return a recorder with a step in its journal."""
    recorder = Recorder(store, make_metrics(CollectorRegistry()), SystemClock(), journal=Journal(tmp_path / "spool"))
    store.failing |= {"append", "probe"}
    await recorder.record(step(number, range(1000)), live, body_bytes=10, work_bytes=10)
    return recorder


async def replayed(recorder, store):
    store.failing.clear()
    async with asyncio.timeout(50):
        while recorder.journaled:
            await asyncio.sleep(0.005)
    await recorder.close()


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("finished_after_s", [None, 100, -100])
async def test_whether_a_journaled_step_is_late_depends_on_when_it_was_journaled(
    store, live, tmp_path, finished_after_s, is_claimed
):
    """A step from before the finish is late only if the rollout was claimed in a batch since."""
    recorder = await journaled(store, live, tmp_path)
    claim = {"claimed_by": "b1"} if is_claimed else {}
    if finished_after_s is not None:
        await finish(store, round((SystemClock().now() + finished_after_s) * 1000), **claim)
    elif is_claimed:
        await store.update_if("r1", write_fields(claim), expect={}, now_ms=1)
    await replayed(recorder, store)

    assert (is_claimed or finished_after_s == -100) == ("S001" in await late_of(store))
    assert len(await stored_steps(store, "r1")) == 1


async def test_an_unreadable_journaled_step_is_late_if_its_rollout_is_finished(store, live, incarnation, tmp_path):
    """The time of its end is unknown."""
    recorder = await journaled(store, live, tmp_path)
    await recorder._journal.write(StepWrite("r1", incarnation, "odd", b"no record"))
    await finish(store, round((SystemClock().now() + 100) * 1000))
    await replayed(recorder, store)

    assert await late_of(store) == {"odd"}


async def expire(store, name="r1"):
    real = store._store
    for key in real.layout.rollout(name).all[:5]:
        await real._servers.execute(key, [("DEL", key)])


@pytest.fixture
async def mortal(server):
    """An empty store that expires rollouts."""
    opened = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8), ttl_s=1000))
    yield FailingStore(opened)
    await opened.close()


async def test_a_step_of_an_expired_rollout_restores_it_with_all_blocks(mortal):
    """Expired blocks are sent again, and the rollout has the fields with which its call opened it."""
    metrics = make_metrics(CollectorRegistry())
    live = await opened(mortal, group_id="g1")
    recorder = Recorder(mortal, metrics, SystemClock())
    await recorder.record(step(1, range(5_000)), live, body_bytes=10, work_bytes=10)
    await expire(mortal)
    await recorder.record(step(2, range(5_000)), live, body_bytes=10, work_bytes=10)
    await recorder.record(step(3, range(5_000)), live, body_bytes=10, work_bytes=10)
    recorder.mark_undelivered(step(3), live.rollout.incarnation)
    await recorder.close()
    rollout = await stored_rollout(mortal, "r1")

    assert [kept.step_id for kept in await stored_steps(mortal, "r1")] == ["S002", "S003"]
    assert (live.rollout.incarnation, 2, 1) == (
        rollout.incarnation,
        rollout.counts["steps"],
        metrics.restored_rollouts._value.get(),
    )
    assert (rollout.created_ms, rollout.group_id) == (1, "g1")
    assert await wait_for_undelivered(mortal, "r1") == {"S003"}


async def test_a_journal_restores_a_rollout_that_expired_while_the_store_was_unreachable(mortal, tmp_path):
    """The entry has the origin, so another process may replay it."""
    live = await opened(mortal, group_id="g1")
    first = Recorder(mortal, make_metrics(CollectorRegistry()), SystemClock(), Journal(tmp_path / "spool"))
    mortal.failing |= {"append", "probe"}
    await first.record(step(1, range(5_000)), live, body_bytes=10, work_bytes=10)
    await first.close()
    await expire(mortal)
    mortal.failing.clear()
    metrics = make_metrics(CollectorRegistry())
    second = Recorder(mortal, metrics, SystemClock(), journal=Journal(tmp_path / "spool"))
    await wait_for_steps(mortal, "r1")
    await replayed(second, mortal)
    rollout = await stored_rollout(mortal, "r1")

    assert (live.rollout.incarnation, 1, "g1", 1) == (
        rollout.incarnation, rollout.created_ms, rollout.group_id, metrics.restored_rollouts._value.get()
    )  # fmt: skip


async def test_a_journaled_step_of_a_deleted_rollout_is_discarded(mortal, tmp_path):
    """It is counted as discarded."""
    live = await opened(mortal)
    recorder = await journaled(mortal, live, tmp_path)
    await mortal.delete("r1")
    await replayed(recorder, mortal)

    assert (await mortal.get("r1"), recorder._metrics.discarded_steps._value.get()) == (None, 1)
