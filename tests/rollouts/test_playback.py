"""Tapes of playbacks: what is opened, and what a step takes over from its origin."""

import asyncio
import gc
from array import array

import pytest
from tests.support.forests import make_step
from tests.support.stored import stored_steps

from proxy.errors import NotFound, UnprocessableRequest
from proxy.rollouts.playback import Tapes, inherited
from proxy.rollouts.rollout import LiveRollout, read_rollout
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Timing
from storage.types import StepWrite


async def source(store, *steps):
    """A rollout r1 with these steps."""
    opened = await store.open("r1", {"model": b'"served"', "metadata": b'{"a":1}'}, now_ms=1)
    for step in steps:
        record = encode(step)
        counts = {"steps": 1}
        write = StepWrite("r1", opened.incarnation, step.step_id, record.record, record.blocks, (), counts)
        await store.append(write, now_ms=2)


def call(step_id, question="Q", **facts):
    """A step of a chat call."""
    request = {"model": "m", "messages": [{"role": "user", "content": question}]}
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}]}
    return make_step(step_id, [1], [2], **{"request": request, "response": response, **facts})


async def opened(store, **terms):
    """The playback that is opened with these terms."""
    fields = await Tapes(store).open({"of": "r1", **terms})
    stored = await store.open("p1", fields, now_ms=3)
    return read_rollout(stored)


@pytest.mark.parametrize(
    ("terms", "end", "answerable", "on_mismatch"),
    [
        ({}, 3, 2, "refuse"),
        ({"before": "s1"}, 0, 0, "branch"),
        ({"before": "s3"}, 2, 1, "branch"),
        ({"through": "s3", "on_mismatch": "sample"}, 3, 2, "sample"),
    ],
)
async def test_a_tape_has_the_steps_before_or_through_a_step(store, terms, end, answerable, on_mismatch):
    await source(store, call("s1"), call("s2", status="partial"), call("s3"))
    playback = (await opened(store, **terms)).playback
    assert (playback.end, playback.answerable, playback.on_mismatch) == (end, answerable, on_mismatch)


async def test_a_playback_has_the_terms_of_its_source_but_not_its_metadata(store):
    await source(store, call("s1"))
    rollout = await opened(store)
    assert (rollout.model, rollout.metadata) == ("served", {})


async def test_a_step_that_is_not_complete_cannot_be_continued(store):
    await source(store, call("s1", status="partial"))
    with pytest.raises(UnprocessableRequest):
        await opened(store, through="s1")
    with pytest.raises(NotFound):
        await opened(store, through="s2")


async def test_playbacks_of_one_source_share_its_tape_and_forget_it_together(store):
    await source(store, call("s1"))
    tapes = Tapes(store)
    live = [LiveRollout(await opened(store)) for _ in range(2)]
    played = [await tapes.play(each, each.rollout.playback) for each in live]
    assert played[0].tape is played[1].tape
    del played, live
    gc.collect()
    assert repr(tapes) == "<Tapes 0>"


async def test_a_source_that_was_deleted_is_gone(store):
    await source(store, call("s1"))
    rollout = await opened(store)
    await store.delete("r1")
    assert await Tapes(store).play(LiveRollout(rollout), rollout.playback) is None


async def test_a_source_that_is_deleted_while_its_tape_is_read_is_gone(store):
    await source(store, call("s1"))
    rollout = await opened(store)
    reached, proceed = store.pauses("blocks")
    playing = asyncio.create_task(Tapes(store).play(LiveRollout(rollout), rollout.playback))
    await reached.wait()
    await store.delete("r1")
    proceed.set()
    assert await playing is None


def test_an_inherited_step_has_the_request_of_its_client_and_the_body_of_its_origin():
    extra = {"request_key": "k", "attempt": 1, "resumed": 2, "continuation": {"step_id": "s0"}}
    origin = call("s1", sent={"set": {"logprobs": True}, "unset": ["rollout_id"]}, extra=extra)
    request = {**origin.request, "stream": True, "messages": [{"role": "user", "content": "Q, today"}]}
    step = inherited(origin, "p1", request, Timing(5.0), {"call_id": "c1"})
    assert step.request is request
    assert step.body == origin.body
    assert (step.step_id, step.rollout_id, step.choices) == ("s1", "p1", origin.choices)
    assert step.extra == {
        "request_key": "k", "attempt": 1, "resumed": 2, "continuation": {"step_id": "s0"}, "call_id": "c1",
        "inherited": {"rollout_id": origin.rollout_id, "step_id": "s1"},
    }  # fmt: skip
    again = inherited(step, "p2", request, Timing(6.0), {})
    assert again.inherited == (origin.rollout_id, "s1")


async def test_steps_that_a_process_does_not_know_are_read_from_the_store(store, monkeypatch):
    await source(store, call("s1"), call("s2"))
    rollout = await opened(store)
    origin, _ = await stored_steps(store, "r1")
    record = encode(inherited(origin, "p1", origin.request, Timing(5.0), {}))
    write = StepWrite("p1", rollout.incarnation, "s1", record.record, record.blocks, (), {"steps": 1, "inherited": 1})
    await store.append(write, now_ms=4)
    live = LiveRollout(read_rollout(await store.get("p1")))
    played = await Tapes(store).play(live, rollout.playback)
    assert list(played.used) == ["s1"]
    assert (await Tapes(store).read(played, rollout.playback, "s2")).choices[0].ids == array("i", [2])
