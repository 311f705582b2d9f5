"""The pause of calls while the weights change."""

import asyncio

import pytest

from proxy.errors import Paused
from proxy.rollouts.pause import Pause


@pytest.fixture
def timeout_s():
    """How long a call may wait; tests override it."""
    return 600.0


@pytest.fixture
async def pauses(store, timeout_s):
    """The pauses of two processes with one store, each with room for one waiting call."""
    processes = [Pause(store.announcements, name, max_waiting=1, timeout_s=timeout_s) for name in "ab"]
    for pause in processes:
        await pause.start()
    yield processes
    for pause in processes:
        await pause.close()


async def test_a_heartbeat_counts_the_calls_of_all_processes_and_the_processes_without_the_pause(pauses):
    """A closed process is not counted."""
    first, second = pauses
    with second.counted():
        await second.beat()
        await first.announce("wait")
        assert (1, 1) == await first.beat()
        await second.beat()  # reads the announcement
        await second.beat()  # reports it
        assert (1, 0) == await first.beat()
    await second.close()

    assert (0, 0) == await first.beat()


async def test_a_call_above_max_paused_is_rejected(pauses):
    """The error names the setting; calls that wait already continue to wait."""
    pause, _ = pauses
    assert not await pause.passed()
    await pause.announce("wait")
    waiting = asyncio.create_task(pause.passed())
    await asyncio.sleep(0)

    with pytest.raises(Paused, match="agents.max_paused"):
        await pause.passed()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("timeout_s", [0.01])
async def test_a_waiting_call_is_rejected_after_pause_timeout_s(pauses):
    """The error names the setting."""
    pause, _ = pauses
    await pause.announce("wait")

    with pytest.raises(Paused, match="agents.pause_timeout_s"):
        await pause.passed()


async def test_waiting_calls_are_rejected_when_the_mode_becomes_reject(pauses):
    """Another process may set the mode."""
    first, second = pauses
    await first.announce("wait")
    waiting = asyncio.create_task(first.passed())
    await asyncio.sleep(0)
    await second.announce("reject")

    with pytest.raises(Paused, match="while the weights change"):
        await waiting
