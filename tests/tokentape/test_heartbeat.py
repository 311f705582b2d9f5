"""Heartbeats call a function at intervals until it returns False or they are stopped."""

import asyncio
import threading

import pytest

from tokentape.heartbeat import AsyncHeartbeat, Heartbeat


@pytest.mark.parametrize("results", [[False], [True, True, False]])
async def test_a_task_ends_when_the_function_returns_false(results):
    left, ended = list(results), asyncio.Event()

    async def beat():
        if len(left) == 1:
            ended.set()
        return left.pop(0)

    heartbeat = AsyncHeartbeat(beat, 0.001)
    await heartbeat.start()
    await ended.wait()
    await heartbeat.stop()

    assert [] == left


async def test_a_stopped_task_does_not_call_the_function_again():
    """A heartbeat that was never started can be stopped, too."""
    beats = []

    async def beat():
        beats.append(1)
        return True

    heartbeat = AsyncHeartbeat(beat, 60)
    await heartbeat.stop()
    await heartbeat.start()
    await asyncio.sleep(0)
    await heartbeat.stop()
    await asyncio.sleep(0)

    assert [] == beats


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "tokentape-heartbeat"]


@pytest.mark.parametrize("results", [[False], [True, True, False]])
def test_a_thread_ends_when_the_function_returns_false(results):
    left = list(results)
    heartbeat = Heartbeat(lambda: left.pop(0), 0.001)
    heartbeat.start()
    for thread in threads():
        thread.join()
    heartbeat.stop()

    assert [] == left


def test_stopping_a_thread_waits_for_a_call_in_progress():
    """A heartbeat that was never started can be stopped, too."""
    begun, beats = threading.Event(), []

    def beat():
        begun.set()
        beats.append("begun")
        while not heartbeat._stopped.is_set():
            pass
        beats.append("ended")
        return True

    Heartbeat(beat, 60).stop()
    heartbeat = Heartbeat(beat, 0.001)
    heartbeat.start()
    begun.wait()
    heartbeat.stop()

    assert ["begun", "ended"] == beats
    assert [] == threads()
