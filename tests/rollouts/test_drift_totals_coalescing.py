"""Work that is asked for again and again, by name."""

import asyncio

import pytest

from proxy.rollouts.drift_totals import Coalescer


class Work:
    """Counts how often it is done; each time waits for the gate."""

    def __init__(self) -> None:
        self.times = 0
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def __call__(self) -> None:
        self.times += 1
        self.begun.set()
        await self.gate.wait()


async def test_work_that_is_asked_for_meanwhile_is_done_once_more():
    """What it has read may be older than what was asked; that nobody else waits for it."""
    coalescer, work = Coalescer(), Work()
    task = asyncio.create_task(coalescer.run("a", work))
    await work.begun.wait()
    for _ in range(3):
        await coalescer.run("a", work)
    assert (1, True) == (work.times, coalescer.is_recent("a"))
    work.gate.set()
    await task

    assert 2 == work.times


async def test_names_do_not_wait_for_each_other():
    """Each has its own turn, and its own rest."""
    coalescer, one, other = Coalescer(), Work(), Work()
    other.gate.set()
    task = asyncio.create_task(coalescer.run("a", one))
    await one.begun.wait()
    await coalescer.run("b", other)
    one.gate.set()
    await task

    assert 1 == other.times
    assert not coalescer.is_recent("c")


async def test_it_rests_after_work_in_proportion(monkeypatch):
    """Whoever looks all the time does not repeat it all the time; and of the oldest rests only so many are remembered."""
    monkeypatch.setattr("proxy.rollouts.drift_totals._MAX_REMEMBERED", 1)
    coalescer, work = Coalescer(), Work()
    work.gate.set()
    await coalescer.run("a", work)
    assert coalescer.is_recent("a")
    await coalescer.run("b", work)

    assert (False, True) == (coalescer.is_recent("a"), coalescer.is_recent("b"))


async def test_work_that_fails_can_be_asked_for_again():
    """The failure is its asker's."""
    coalescer = Coalescer()

    async def fails() -> None:
        raise ValueError("so")

    for _ in range(2):
        with pytest.raises(ValueError, match="so"):
            await coalescer.run("a", fails)
