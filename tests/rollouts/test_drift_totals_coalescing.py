"""Work that is asked for again and again, by name."""

import asyncio

import pytest

from proxy.rollouts.drift_totals import Settling


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
    settling, work = Settling(), Work()
    task = asyncio.create_task(settling.settle("a", work))
    await work.begun.wait()
    for _ in range(3):
        await settling.settle("a", work)
    assert (1, True) == (work.times, settling.rests("a"))
    work.gate.set()
    await task

    assert 2 == work.times


async def test_names_do_not_wait_for_each_other():
    """Each has its own turn, and its own rest."""
    settling, one, other = Settling(), Work(), Work()
    other.gate.set()
    task = asyncio.create_task(settling.settle("a", one))
    await one.begun.wait()
    await settling.settle("b", other)
    one.gate.set()
    await task

    assert 1 == other.times
    assert not settling.rests("c")


async def test_it_rests_after_work_in_proportion(monkeypatch):
    """Whoever looks all the time does not repeat it all the time; and of the oldest rests only so many are remembered."""
    monkeypatch.setattr("proxy.rollouts.drift_totals._MOST_REMEMBERED", 1)
    settling, work = Settling(), Work()
    work.gate.set()
    await settling.settle("a", work)
    assert settling.rests("a")
    await settling.settle("b", work)

    assert (False, True) == (settling.rests("a"), settling.rests("b"))


async def test_work_that_fails_can_be_asked_for_again():
    """The failure is its asker's."""
    settling = Settling()

    async def fails() -> None:
        raise ValueError("so")

    for _ in range(2):
        with pytest.raises(ValueError, match="so"):
            await settling.settle("a", fails)
