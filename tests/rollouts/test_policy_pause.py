"""The pause of calls while the weights change."""

import asyncio

import pytest

from proxy.errors import Paused
from proxy.rollouts.policy import Pause


@pytest.fixture
def timeout_s():
    """How long a call may wait; tests override it."""
    return 600.0


@pytest.fixture
async def pauses(store, timeout_s):
    """The pauses of two processes with one store, each with room for one waiting call."""
    both = [Pause(store.announcements, name, max_waiting=1, timeout_s=timeout_s) for name in "ab"]
    for pause in both:
        await pause.start()
    yield both
    for pause in both:
        await pause.close()


async def test_a_process_counts_the_calls_of_all_processes_and_those_without_the_pause(pauses):
    """A heartbeat reports the known pause; a closed process no longer counts."""
    here, there = pauses
    with there.counted():
        await there.beat()
        await here.announce("wait")
        assert (1, 1) == await here.beat()
        await there.beat()  # reads the announcement
        await there.beat()  # reports it
        assert (1, 0) == await here.beat()
    await there.close()

    assert (0, 0) == await here.beat()


async def test_a_call_above_max_paused_is_refused(pauses):
    """The error names the setting; the waiting call continues to wait."""
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
async def test_a_call_is_refused_after_the_timeout(pauses):
    """The error names the setting."""
    pause, _ = pauses
    await pause.announce("wait")

    with pytest.raises(Paused, match="agents.pause_timeout_s"):
        await pause.passed()


async def test_waiting_calls_are_refused_when_the_mode_becomes_reject(pauses):
    """Also when the other process announces it."""
    here, there = pauses
    await here.announce("wait")
    waiting = asyncio.create_task(here.passed())
    await asyncio.sleep(0)
    await there.announce("reject")

    with pytest.raises(Paused, match="while the weights change"):
        await waiting
