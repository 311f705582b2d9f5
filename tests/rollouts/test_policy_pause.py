"""The pause: calls held while the weights change."""

import asyncio

import pytest

from proxy.errors import Paused
from proxy.rollouts.policy import Pause


@pytest.fixture
def timeout_s():
    """How long a call may wait; a test may say otherwise."""
    return 600.0


@pytest.fixture
async def pauses(store, timeout_s):
    """Two processes' pauses over one store, each with room for one call that waits."""
    both = [Pause(store.announcements, who, max_waiting=1, timeout_s=timeout_s) for who in "ab"]
    for pause in both:
        await pause.start()
    yield both
    for pause in both:
        await pause.close()


async def test_a_process_counts_the_calls_of_all_and_who_does_not_know_yet(pauses):
    """One that has beaten since it was told knows; one that closed counts no more."""
    here, there = pauses
    with there.counted():
        await there.beat()
        await here.announce("wait")
        assert (1, 1) == await here.beat()
        await there.beat()  # learns it
        await there.beat()  # says so
        assert (1, 0) == await here.beat()
    await there.close()

    assert (0, 0) == await here.beat()


async def test_past_the_bound_a_call_is_refused(pauses):
    """The refusal names the setting; the call that waits goes on waiting."""
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
async def test_past_the_time_a_call_is_refused(pauses):
    """The refusal names the setting."""
    pause, _ = pauses
    await pause.announce("wait")

    with pytest.raises(Paused, match="agents.pause_timeout_s"):
        await pause.passed()


async def test_a_wait_that_turns_into_a_refusal_refuses_who_waits(pauses):
    """Also when the other process says so."""
    here, there = pauses
    await here.announce("wait")
    waiting = asyncio.create_task(here.passed())
    await asyncio.sleep(0)
    await there.announce("reject")

    with pytest.raises(Paused, match="while the weights change"):
        await waiting
