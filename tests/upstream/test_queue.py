"""The turns of calls at one endpoint."""

import asyncio
from contextlib import suppress

import pytest

from proxy.errors import EngineBusy
from proxy.upstream.queue import FairQueue


def turns_of(limit, max_waiting=2000, timeout_s=60):
    return FairQueue(limit, max_waiting=max_waiting, timeout_s=timeout_s)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def queue():
    """Calls in a queue: `came(rollout, n)` sends n of them, `order` is whose turn it was."""

    class Queue:
        def __init__(self):
            self.order, self.tasks = [], []

        async def came(self, turns, rollout_id, count=1, **said):
            async def call():
                has_turn = await turns.take(rollout_id, **{"may_leave": False, **said})
                self.order.append(rollout_id if has_turn else f"not {rollout_id}")

            tasks = [asyncio.create_task(call()) for _ in range(count)]
            self.tasks += tasks
            await settled()
            return tasks

    return Queue()


async def test_without_a_limit_nobody_waits(queue):
    """They are counted all the same."""
    turns = turns_of(None)
    await queue.came(turns, "a", 1000)

    assert (1000, 0) == (turns.in_flight, turns.waiting)


async def test_a_rollout_with_many_calls_does_not_starve_others(queue):
    """Those that wait have their turns rollout by rollout, and the calls of one in the order in which they came."""
    turns = turns_of(2)
    await queue.came(turns, "big", 1000)
    for rollout in ("b", "c", "c"):
        await queue.came(turns, rollout)
    assert (2, 1001) == (turns.in_flight, turns.waiting)

    for _ in range(7):
        turns.give_back()
        await settled()
    assert ["big", "big", "big", "b", "c", "big", "c", "big", "big"] == queue.order
    while turns.in_flight:
        turns.give_back()
        await settled()
    assert 1003 == len(queue.order)


async def test_past_the_bounds_a_call_is_refused(queue):
    """Each refusal names its setting, and leaves nothing behind."""
    turns = turns_of(1, max_waiting=1, timeout_s=0.05)
    await queue.came(turns, "a")
    with pytest.raises(EngineBusy, match="engines.queue_timeout_s"):
        await turns.take("b", may_leave=False)

    patient = turns_of(1, max_waiting=1)
    await queue.came(patient, "a")
    (waiting,) = await queue.came(patient, "b")
    with pytest.raises(EngineBusy, match="engines.max_queued"):
        await patient.take("c", may_leave=False)
    waiting.cancel()
    await settled()
    assert (1, 0) == (patient.in_flight, patient.waiting)

    turns.give_back()
    assert (0, 0, True) == (turns.in_flight, turns.waiting, turns.is_free)


async def test_who_may_go_elsewhere_is_told_to(queue):
    """Of an endpoint that is away; the others wait on."""
    turns = turns_of(1)
    await queue.came(turns, "a")
    await queue.came(turns, "b", may_leave=True)
    await queue.came(turns, "c")
    turns.turn_away()
    await settled()

    assert (["a", "not b"], 1) == (queue.order, turns.waiting)
    turns.give_back()
    await settled()
    assert ["a", "not b", "c"] == queue.order


async def test_a_greater_limit_is_used_at_once(queue):
    """And a smaller one when enough calls have ended."""
    turns = turns_of(1)
    await queue.came(turns, "a", 5)
    turns.limit = 3
    turns.go_on()
    await settled()
    assert (3, 2) == (turns.in_flight, turns.waiting)

    turns.limit = 1
    turns.give_back()
    turns.give_back()
    await settled()
    assert (1, 2) == (turns.in_flight, turns.waiting)


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("moment", ["before", "with", "after"])
async def test_a_call_that_is_cancelled_at_any_moment_keeps_no_turn(steps, moment):
    """Before it has its turn, in the very step in which it gets it, or later: the next one has it."""
    turns = turns_of(1)

    async def call():
        if await turns.take("a", may_leave=False):
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            finally:
                turns.give_back()

    await turns.take("first", may_leave=False)
    victim = asyncio.create_task(call())
    for _ in range(steps):
        await asyncio.sleep(0)
    if moment == "before":
        victim.cancel()
    turns.give_back()
    if moment == "after":
        await asyncio.sleep(0)
    victim.cancel()
    with suppress(asyncio.CancelledError):
        await victim

    assert (0, 0) == (turns.in_flight, turns.waiting)
    async with asyncio.timeout(50):
        assert await turns.take("next", may_leave=False)
