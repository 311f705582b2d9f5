"""Calls of playbacks whose client leaves, or whose store fails, at each await."""

import asyncio

import pytest
from tests.api.model import test_playing
from tests.api.model.test_playing import run
from tests.support.stored import stored_steps, wait_for_undelivered

from proxy.rollouts.rollout import read_marks

proxies = test_playing.proxies
QUESTION = [{"role": "user", "content": "Weather?"}]
KEY = {"Idempotency-Key": "k"}
RETRY = {"X-Stainless-Retry-Count": "1"}


async def left(call, reached):
    """Leave a call once it is there."""
    task = asyncio.create_task(call)
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_whose_key_cannot_be_noted_uses_no_step(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    await proxies.chat("p1", [{"role": "user", "content": "Snow?"}])  # the tape is read
    store.failing.add("mark")
    assert (await proxies.chat("p1", QUESTION, headers=KEY))[0] == 503
    store.failing.clear()
    async with asyncio.timeout(20):
        while (response := await proxies.chat("p1", QUESTION, headers=KEY | RETRY))[0] == 503:
            await asyncio.sleep(0.01)
    assert response[1]["X-Playback"] == "answered"
    assert len(await stored_steps(store, "p1")) == 1


async def test_a_client_that_leaves_while_its_key_is_noted_gets_the_step_later(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    reached, proceed = store.pauses("mark")
    await left(proxies.chat("p1", QUESTION, headers=KEY), reached)
    proceed.set()
    await wait_for_undelivered(store, "p1")
    status, headers, _ = await proxies.chat("p1", QUESTION, headers=KEY)
    assert (status, headers["X-Idempotent-Replayed"]) == (200, "true")
    assert len(await stored_steps(store, "p1")) == 1


async def test_a_retry_waits_until_the_first_attempt_is_stored(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    reached, proceed = store.pauses("append")
    first = asyncio.create_task(proxies.chat("p1", QUESTION))
    await reached.wait()
    retry = asyncio.create_task(proxies.chat("p1", QUESTION, headers=RETRY))
    done, _ = await asyncio.wait([retry], timeout=0.3)
    assert not done
    proceed.set()
    await first
    _, headers, _ = await retry
    assert headers["X-Playback"] == "again"


async def test_a_client_that_leaves_while_another_process_uses_the_step_marks_nothing(proxies, store):
    for _ in range(2):
        await proxies.chat("r1", QUESTION)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    for at in (0, 1):
        await proxies.chat("p1", [{"role": "user", "content": "Snow?"}], at)
    reached, proceed = store.pauses("append")
    both = asyncio.create_task(proxies.chat("p1", QUESTION, 0))
    await reached.wait()
    reached.clear()
    await left(proxies.chat("p1", QUESTION, 1), reached)
    proceed.set()
    await both
    await proxies.chat("p1", QUESTION, 1)
    assert (await proxies.chat("p1", QUESTION, 1))[0] == 422
    steps = [step.step_id for step in await stored_steps(store, "p1")]
    assert steps == [step.step_id for step in await stored_steps(store, "r1")]
    assert not read_marks(await store.marks("p1")).undelivered


async def test_a_client_that_leaves_while_the_response_is_written_is_noted(proxies, store, monkeypatch):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    reached = asyncio.Event()

    async def prepare(self, request):
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr("proxy.api.model.playing.web.Response.prepare", prepare)
        await left(proxies.chat("p1", QUESTION), reached)
        await wait_for_undelivered(store, "p1")
    assert (await proxies.chat("p1", QUESTION))[1]["X-Playback"] == "again"


async def test_a_branch_whose_template_has_other_values_gets_the_rendered_prompt(proxies, store):
    await run(proxies, "r1", calls=1)
    first = (await stored_steps(store, "r1"))[0]
    sampling = {"override": {"chat_template_kwargs": {"enable_thinking": True}}}
    await proxies.open(rollout_id="p1", playback={"of": "r1", "before": first.step_id}, sampling=sampling)
    await run(proxies, "p1", calls=1)
    branch = (await stored_steps(store, "p1"))[0]
    assert branch.extra["branched_from"]["ids"] is False


async def test_a_call_of_a_playback_that_is_deleted_meanwhile_is_not_answered(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    reached, proceed = store.pauses("append")
    playing = asyncio.create_task(proxies.chat("p1", QUESTION))
    await reached.wait()
    await store.delete("p1")
    proceed.set()
    assert (await playing)[0] == 404
    assert await store.get("p1") is None


async def test_the_tape_of_refused_calls_counts_as_memory(proxies, store, http):
    async def counted():
        async with http.get(f"{proxies.urls[1]}/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("tokentape_rollout_cache_bytes "))

    for number in range(20):
        await proxies.chat("r1", [{"role": "user", "content": f"Weather {number}?"}])
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    assert (await proxies.chat("p1", [{"role": "user", "content": "Snow?"}], 1))[0] == 422
    assert await counted() > 20_000  # 40 objects of a tape, besides the rollout's own
