"""The queue of calls at one endpoint."""

import asyncio
from contextlib import suppress

import pytest

from proxy.errors import EngineBusy
from proxy.upstream.endpoint import FairQueue


def make_queue(limit, max_waiting=2000, timeout_s=60):
    return FairQueue(limit, max_waiting=max_waiting, timeout_s=timeout_s)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def calls():
    """A helper that starts calls; `order` lists the rollouts in the order in which they acquired the endpoint."""

    class Calls:
        def __init__(self):
            self.order, self.tasks = [], []

        async def start(self, queue, rollout_id, count=1, **options):
            async def call():
                is_acquired = await queue.acquire(rollout_id, **{"can_fail_over": False, **options})
                self.order.append(rollout_id if is_acquired else f"not {rollout_id}")

            tasks = [asyncio.create_task(call()) for _ in range(count)]
            self.tasks += tasks
            await settled()
            return tasks

    return Calls()


async def test_without_a_limit_no_call_waits(calls):
    """Calls are still counted."""
    queue = make_queue(None)
    await calls.start(queue, "a", 1000)

    assert (queue.in_flight, queue.waiting) == (1000, 0)


async def test_a_rollout_with_many_calls_does_not_starve_others(calls):
    """The queue is round-robin over rollouts, and first-in first-out within a rollout."""
    queue = make_queue(2)
    await calls.start(queue, "big", 1000)
    for rollout in ("b", "c", "c"):
        await calls.start(queue, rollout)
    assert (queue.in_flight, queue.waiting) == (2, 1001)

    for _ in range(7):
        queue.release()
        await settled()
    assert calls.order == ["big", "big", "big", "b", "c", "big", "c", "big", "big"]
    while queue.in_flight:
        queue.release()
        await settled()
    assert len(calls.order) == 1003


async def test_calls_beyond_max_queued_or_queue_timeout_s_are_rejected(calls):
    """The error names the setting, and the queue's counts are restored."""
    queue = make_queue(1, max_waiting=1, timeout_s=0.05)
    await calls.start(queue, "a")
    with pytest.raises(EngineBusy, match="engines.queue_timeout_s"):
        await queue.acquire("b", can_fail_over=False)

    patient = make_queue(1, max_waiting=1)
    await calls.start(patient, "a")
    (waiting,) = await calls.start(patient, "b")
    with pytest.raises(EngineBusy, match="engines.max_queued"):
        await patient.acquire("c", can_fail_over=False)
    waiting.cancel()
    await settled()
    assert (patient.in_flight, patient.waiting) == (1, 0)

    queue.release()
    assert (queue.in_flight, queue.waiting, queue.acquire_free()) == (0, 0, True)


async def test_evict_waiters_returns_only_calls_that_can_fail_over(calls):
    """Other calls keep waiting."""
    queue = make_queue(1)
    await calls.start(queue, "a")
    await calls.start(queue, "b", can_fail_over=True)
    await calls.start(queue, "c")
    queue.evict_waiters()
    await settled()

    assert (calls.order, queue.waiting) == (["a", "not b"], 1)
    queue.release()
    await settled()
    assert calls.order == ["a", "not b", "c"]


async def test_a_raised_limit_takes_effect_at_once(calls):
    """A lowered one takes effect when enough calls have ended."""
    queue = make_queue(1)
    await calls.start(queue, "a", 5)
    queue.limit = 3
    queue.dispatch()
    await settled()
    assert (queue.in_flight, queue.waiting) == (3, 2)

    queue.limit = 1
    queue.release()
    queue.release()
    await settled()
    assert (queue.in_flight, queue.waiting) == (1, 2)


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("moment", ["before", "with", "after"])
async def test_a_call_cancelled_at_any_moment_frees_its_slot(steps, moment):
    """Before it acquires, in the same event loop iteration, or after."""
    queue = make_queue(1)

    async def call():
        if await queue.acquire("a", can_fail_over=False):
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            finally:
                queue.release()

    await queue.acquire("first", can_fail_over=False)
    victim = asyncio.create_task(call())
    for _ in range(steps):
        await asyncio.sleep(0)
    if moment == "before":
        victim.cancel()
    queue.release()
    if moment == "after":
        await asyncio.sleep(0)
    victim.cancel()
    with suppress(asyncio.CancelledError):
        await victim

    assert (queue.in_flight, queue.waiting) == (0, 0)
    async with asyncio.timeout(50):
        assert await queue.acquire("next", can_fail_over=False)
