"""Rollouts with `idle_s` are touched while they have calls in flight."""

import asyncio
from contextlib import contextmanager

import pytest
from tests.support.fakes import FailingStore
from tests.support.sweeping import Process, SetClock, open_rollout

from proxy.rollouts.admission import Activity
from proxy.rollouts.rollout import Rollout
from proxy.upstream.concurrency import BackgroundTasks

TIMEOUT_S = 50


@pytest.fixture
def clock():
    return SetClock(5000)


@pytest.fixture
def process(store, clock):
    return Process(store, clock)


@pytest.fixture
def tasks():
    return BackgroundTasks()


@pytest.fixture
async def activity(store, clock, process, tasks, monkeypatch):
    """The activity of a process that touches every few milliseconds."""
    monkeypatch.setattr("proxy.rollouts.admission._TICK_S", 0.002)
    monkeypatch.setattr("proxy.rollouts.rollout._MIN_IDLE_S", 0.01)
    activity = Activity(store, clock, process.metrics, tasks.start).start()
    yield activity
    await activity.close()
    await tasks.wait()


@contextmanager
def kept(activity, rollout):
    """A call of the rollout is in flight."""
    assert activity.begin(rollout)
    yield
    activity.end(rollout)


async def touched_ms(store, name="r1") -> int:
    return (await store.get(name)).touched_ms


async def touched_at(store, ms):
    async with asyncio.timeout(TIMEOUT_S):
        while await touched_ms(store) != ms:
            await asyncio.sleep(0.002)


async def test_a_rollout_is_touched_again_and_again_while_it_has_a_call_in_flight(store, activity, tasks, clock):
    """And once more when its last call ends, which may have no step; then no more."""
    rollout = await open_rollout(store, "r1", idle_s=0.01)
    with kept(activity, rollout), kept(activity, rollout):
        for clock.ms in (6000, 7000, 8000):
            await touched_at(store, clock.ms)
        assert repr(activity) == "<Activity of 1 rollouts>"
        activity._active[next(iter(activity._active))].touch_s += 1000
        clock.ms = 9000
    await tasks.wait()
    at_end = await touched_ms(store)
    clock.ms = 10_000
    await activity.touch()

    assert (at_end, await touched_ms(store)) == (9000, 9000)
    assert repr(activity) == "<Activity of 0 rollouts>"


async def test_a_sweep_does_not_find_a_rollout_with_a_call_in_flight_idle(store, activity, tasks, clock, process):
    """However long the call takes: it is finished its idle time after the call."""
    rollout = await open_rollout(store, "r1", now_ms=clock.ms, idle_s=3)
    with kept(activity, rollout):
        for clock.ms in range(6000, 60_000, 2000):
            activity._active[next(iter(activity._active))].touch_s = 0
            await touched_at(store, clock.ms)
            await process.deadlines.sweep()
    await tasks.wait()
    ended, clock.ms = clock.ms, clock.ms + 2999
    await process.deadlines.sweep()
    before = (await store.get("r1")).fields.get("status")
    clock.ms += 1
    await process.deadlines.sweep()
    finished = (await store.get("r1")).fields

    assert before is None
    assert (finished["status"], finished["finished_ms"]) == (b'"aborted"', b"%d" % (ended + 3000))


async def test_touches_continue_after_store_failures(store, activity, tasks, clock, process):
    rollout = await open_rollout(store, "r1", idle_s=0.01)

    async def failures(count):
        async with asyncio.timeout(TIMEOUT_S):
            while process.metrics.store_operation_failures.labels("renew")._value.get() < count:
                await asyncio.sleep(0.002)

    with kept(activity, rollout):
        store.failing.add("renew")
        await failures(3)
        store.failing.clear()
        clock.ms = 6000
        await touched_at(store, 6000)
        store.failing.add("renew")
    await tasks.wait()  # the touch at the end fails as well, and is not repeated


async def test_each_rollout_is_touched_when_its_time_has_come_with_at_most_64_touches_at_a_time(store, clock, process):
    """The number of its calls does not matter; a third of its idle time later it is touched again."""
    at_once, most, touched = 0, 0, []
    slow = FailingStore(store)

    async def renew(name, incarnation, *, now_ms):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        touched.append(name)
        at_once -= 1

    slow.renew = renew
    activity = Activity(slow, clock, process.metrics, lambda work: work.close())
    rollouts = [Rollout(f"r{number % 500}", "b", 1, 1, idle_s=30 + number % 500) for number in range(2000)]
    for rollout in rollouts:
        activity.begin(rollout)
    await activity.touch()
    early = len(touched)
    for active in list(activity._active.values())[:300]:
        active.touch_s = 0
    await activity.touch()
    await activity.touch()
    for rollout in rollouts:
        activity.end(rollout)
    await activity.close()

    assert early == 0
    assert len(touched) == len(set(touched)) == 300
    assert most <= 64


async def test_a_process_sweeps_again_after_the_store_failed(store, clock, process, monkeypatch):
    """It waits first, so that processes with calls in flight touch their rollouts."""
    monkeypatch.setattr("proxy.rollouts.finishing._INTERVALS_S", (0.001, 0.002))
    monkeypatch.setattr("proxy.rollouts.finishing._AFTER_FAILURE_S", 0.01)
    await open_rollout(store, "r1", deadline_s=1)
    clock.ms = 9000
    store.failing.add("get")
    process.deadlines.start()
    async with asyncio.timeout(TIMEOUT_S):
        while process.metrics.store_operation_failures.labels("deadlines")._value.get() < 1:
            await asyncio.sleep(0.002)
        store.failing.clear()
        clock.ms += 10_000  # the claim of the timer ends
        while not process.counted:
            await asyncio.sleep(0.002)
    await process.deadlines.close()

    assert (await store.get("r1")).fields["status"] == b'"aborted"'
