"""Coalescing repeated work by name."""

import asyncio

import pytest

from proxy.rollouts.drift_totals import Coalescer


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
    assert (1, True) == (work.times, coalescer.is_recent("a"))
    work.gate.set()
    await task

    assert 2 == work.times


async def test_work_of_different_names_runs_concurrently():
    coalescer, first, second = Coalescer(), Work(), Work()
    second.gate.set()
    task = asyncio.create_task(coalescer.run("a", first))
    await first.begun.wait()
    await coalescer.run("b", second)
    first.gate.set()
    await task

    assert 1 == second.times
    assert not coalescer.is_recent("c")


async def test_work_is_recent_for_a_time_after_it_ran(monkeypatch):
    """The number of remembered names is limited."""
    monkeypatch.setattr("proxy.rollouts.drift_totals._MAX_REMEMBERED", 1)
    coalescer, work = Coalescer(), Work()
    work.gate.set()
    await coalescer.run("a", work)
    assert coalescer.is_recent("a")
    await coalescer.run("b", work)

    assert (False, True) == (coalescer.is_recent("a"), coalescer.is_recent("b"))


async def test_failed_work_raises_and_can_be_repeated():
    coalescer = Coalescer()

    async def fails() -> None:
        raise ValueError("so")

    for _ in range(2):
        with pytest.raises(ValueError, match="so"):
            await coalescer.run("a", fails)
