"""Deadlines of rollouts: sweeps of several processes, and touches of rollouts with calls in flight."""

import asyncio
import logging
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stored import stored_rollout
from tests.support.sweeping import Process, SetClock, open_group, open_rollout, timer_count

from proxy.rollouts.group import find_group
from proxy.rollouts.rollout import write_fields
from storage import StoreOptions, open_store
from storage.errors import StoreUnreachable

LEASE_MS = 10_000
TIMEOUT_S = 50


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def processes(store, clock):
    """Three processes with one store and one clock."""
    return [Process(store, clock) for _ in range(3)]


async def ending(store, name="r1"):
    rollout = await stored_rollout(store, name)
    return rollout.status, rollout.reason, rollout.finished_ms


async def test_a_rollout_is_finished_at_its_deadline(store, processes, clock):
    """As aborted, with the reason `deadline`, by one process."""
    await open_rollout(store, "r1", deadline_s=2)
    clock.ms = 2999
    await processes[0].deadlines.sweep()
    before = await ending(store)
    clock.ms = 3000
    for process in processes:
        await process.deadlines.sweep()

    assert before == ("open", None, None)
    assert await ending(store) == ("aborted", "deadline", 3000)
    assert [process.counted for process in processes] == [1, 0, 0]
    assert await timer_count(store) == 0


async def test_a_rollout_is_finished_after_it_was_not_touched_for_its_idle_time(store, processes, clock):
    """Each write of it, as the end of a call, begins the time again; the timer follows."""
    rollout = await open_rollout(store, "r1", deadline_s=100, idle_s=5)
    for clock.ms in range(2000, 30_000, 4000):
        await store.renew("r1", rollout.incarnation, now_ms=clock.ms)
        await processes[0].deadlines.sweep()
    clock.ms += 4999
    await processes[0].deadlines.sweep()
    before = await ending(store)
    clock.ms += 1
    await processes[1].deadlines.sweep()

    assert before == ("open", None, None)
    assert await ending(store) == ("aborted", "deadline", 31_000)


async def test_a_rollout_that_is_never_idle_ends_at_its_deadline(store, processes, clock):
    rollout = await open_rollout(store, "r1", deadline_s=10, idle_s=5)
    for clock.ms in range(2000, 11_000, 1000):
        await store.renew("r1", rollout.incarnation, now_ms=clock.ms)
        await processes[0].deadlines.sweep()
    clock.ms = 11_000
    await store.renew("r1", rollout.incarnation, now_ms=clock.ms)
    await processes[0].deadlines.sweep()

    assert await ending(store) == ("aborted", "deadline", 11_000)


async def test_a_group_completes_when_its_last_member_is_finished_by_its_deadline(store, processes, clock):
    """It is enqueued once, although three processes sweep at the same time. A limited rollout is finished as well."""
    first, second, third = await open_group(store, "g", 3, deadline_s=2)
    await processes[0].finisher.finish(await stored_rollout(store, first), "completed", reward=1)
    await store.update_if(second, {"status": b'"limited"'}, expect={}, now_ms=1)
    clock.ms = 3000
    await asyncio.gather(*(process.deadlines.sweep() for process in processes))

    assert (await ending(store, first))[:2] == ("completed", None)
    assert [(await ending(store, name))[:2] for name in (second, third)] == [("aborted", "deadline")] * 2
    assert [queued.group for queued in (await store.queue.read(limit=9)).groups] == ["g"]
    assert sum(process.counted for process in processes) == 2
    assert await timer_count(store) == 0


async def test_a_finish_removes_the_timer(store, processes):
    """Of a rollout that ends before its deadline; a store failure at that moment leaves it to a sweep."""
    rollout = await open_rollout(store, "r1", idle_s=5, deadline_s=9)
    await processes[0].finisher.finish(rollout, "completed")
    removed = await timer_count(store)
    other = await open_rollout(store, "r2", idle_s=5)
    remove, store.timers.remove = store.timers.remove, unreachable
    await processes[0].finisher.finish(other, "completed")
    store.timers.remove = remove

    assert (removed, await timer_count(store)) == (0, 1)


async def unreachable(*_, **__):
    raise StoreUnreachable("the test took the store away")


async def test_only_the_process_that_has_the_turn_sweeps(store, processes, clock, monkeypatch):
    """The others ask again later, and sweep all the same while they cannot ask."""
    monkeypatch.setattr("proxy.rollouts.finishing._INTERVALS_S", (0.001, 0.002))
    await open_rollout(store, "r1", deadline_s=1)
    clock.ms = 9000
    events = [False, False, StoreUnreachable("down")]
    claim = store.timers.claim

    async def has_turn(_turn_ms):
        turn = events.pop(0) if events else False
        if isinstance(turn, StoreUnreachable):
            raise turn
        return turn

    async def claimed(*arguments, **named):
        assert not events, "it swept without a turn"
        return await claim(*arguments, **named)

    monkeypatch.setattr(store.timers, "has_turn", has_turn)
    monkeypatch.setattr(store.timers, "claim", claimed)
    processes[0].deadlines.start()
    async with asyncio.timeout(TIMEOUT_S):
        while not processes[0].counted:
            await asyncio.sleep(0.002)
    await processes[0].deadlines.close()

    assert await ending(store) == ("aborted", "deadline", 9000)


async def test_the_process_that_has_the_turn_repairs_the_index(store, server, clock, monkeypatch):
    """A process of 0.1.0 wrote a rollout; ten minutes later nothing is wrong."""
    monkeypatch.setattr("proxy.rollouts.finishing._INTERVALS_S", (0.001, 0.002))
    monkeypatch.setattr("proxy.rollouts.finishing._LOOK_INTERVAL_S", 0)
    options = StoreOptions(prefix=store.layout.prefix, indexed={})
    old = await open_store(f"unix:{server.socket}", options)
    await old.open("r1", {}, now_ms=5)
    await old.close()
    process, status = Process(store, clock), ("status", b'"open"', None, 5, None, None)
    before = await store.listing.page_of(*status)
    process.deadlines.start()
    async with asyncio.timeout(TIMEOUT_S):
        while (page := await store.listing.page_of(*status)) is None:
            clock.ms += 60_000
            await asyncio.sleep(0.01)
    await process.deadlines.close()

    assert (before, page.names) == (None, ("r1",))


async def test_timers_of_rollouts_that_are_gone_or_have_no_deadline_are_removed(store, processes, clock):
    """A rollout that was restored has a timer, also without deadlines."""
    await store.open("without", {}, now_ms=1, timer_ms=5)
    await store.open("gone", {}, now_ms=1, timer_ms=5)
    key = store.layout.rollout("gone").rollout
    await store._servers.execute(key, [("DEL", key)])  # as if it had expired
    await processes[0].deadlines.sweep()

    assert await ending(store, "without") == ("open", None, None)
    assert await store.get("gone") is None
    assert await timer_count(store) == 0


async def test_a_process_that_dies_after_the_finish_leaves_the_group_to_another(store, processes, clock, monkeypatch):
    """The timer that it claimed expires; then another process completes the group, and counts nothing twice."""
    (member,) = await open_group(store, "g", 1, deadline_s=2)
    clock.ms = 3000
    marking, store.groups.mark = store.groups.mark, unreachable
    with pytest.raises(StoreUnreachable):
        await processes[0].deadlines.sweep()
    store.groups.mark = marking
    finished = await ending(store, member)
    await processes[1].deadlines.sweep()
    waiting = (await find_group(store, "g")).status_at(0)
    clock.ms += LEASE_MS
    await processes[1].deadlines.sweep()

    assert finished == await ending(store, member) == ("aborted", "deadline", 3000)
    assert (waiting, (await find_group(store, "g")).status_at(0)) == ("open", "complete")
    assert [process.counted for process in processes] == [1, 0, 0]
    assert [process.settled for process in processes] == [[member], [], []]


@contextmanager
def overtaken(store, act):
    """Call `act` with the name of a rollout immediately before the first update of each."""
    real, seen = store._store, set()

    async def update_if(name, fields, **named):
        if name not in seen:
            seen.add(name)
            await act(name)
        return await type(real).update_if(real, name, fields, **named)

    with patch.object(real, "update_if", update_if):
        yield


async def test_a_finish_at_the_same_moment_wins_or_loses_as_a_whole(store, processes, clock):
    """If a trainer finishes the rollout between the look and the finish, its status stays, and its group completes."""
    (member,) = await open_group(store, "g", 1, deadline_s=2)
    clock.ms = 3000

    async def finish(name):
        await store.update_if(name, {"status": b'"completed"', "finished_ms": b"2999"}, expect={}, now_ms=2999)

    with overtaken(store, finish):
        await processes[0].deadlines.sweep()
    before = await find_group(store, "g")
    clock.ms += LEASE_MS
    await processes[1].deadlines.sweep()

    assert await ending(store, member) == ("completed", None, 2999)
    assert (before.status_at(0), (await find_group(store, "g")).status_at(0)) == ("open", "complete")
    assert sum(process.counted for process in processes) == 0
    assert await timer_count(store) == 0


async def test_a_call_that_begins_between_the_look_and_the_finish_keeps_an_idle_rollout_open(store, processes, clock):
    """It is looked at again its idle time after that call. A rollout that is past `deadline_s` is finished all the same."""
    await open_rollout(store, "idle", idle_s=2)
    await open_rollout(store, "old", deadline_s=2, idle_s=2)
    clock.ms = 3000
    with overtaken(store, lambda name: store.open(name, {}, now_ms=clock.ms)):
        await processes[0].deadlines.sweep()
    before = [await ending(store, name) for name in ("idle", "old")]
    for clock.ms in (4999, 5000):
        await processes[1].deadlines.sweep()

    assert before == [("open", None, None), ("aborted", "deadline", 3000)]
    assert await ending(store, "idle") == ("aborted", "deadline", 5000)


async def test_a_rollout_that_is_deleted_at_that_moment_is_not_created(store, processes, clock):
    await open_rollout(store, "r1", deadline_s=2)
    clock.ms = 3000
    with overtaken(store, store.delete):
        await processes[0].deadlines.sweep()

    assert await store.get("r1") is None
    assert await timer_count(store) == 0


async def test_an_unreadable_rollout_does_not_keep_others_open(store, processes, clock, caplog, monkeypatch):
    """It is logged, and looked at again after the claim of its timer."""
    monkeypatch.setattr(logging.getLogger("tokentape"), "propagate", True)
    await store.open("broken", {"deadline_s": b"{"}, now_ms=1, timer_ms=5)
    await open_rollout(store, "r1", deadline_s=2)
    clock.ms = 3000
    await processes[0].deadlines.sweep()

    assert (await ending(store))[0] == "aborted"
    assert "rollout 'broken' is unreadable: field 'deadline_s'" in caplog.text
    assert [timer.rollout for timer in await store.timers.claim(9, now_ms=3000 + LEASE_MS, until_ms=10**9)] == [
        "broken"
    ]


async def test_of_ten_thousand_rollouts_those_that_are_due_are_finished_once(store, processes, clock):
    """By three processes that sweep at the same time; the timers of the others follow their last call."""
    names = [f"r{number}" for number in range(10_000)]
    for start in range(0, len(names), 500):
        terms = {"deadline_s": 2} if start < 2000 else {"idle_s": 3}
        fields = write_fields(terms)
        chunk = names[start : start + 500]
        await asyncio.gather(*(store.open(name, fields, now_ms=1000, timer_ms=2000) for name in chunk))
    clock.ms = 3000
    await asyncio.gather(*(process.deadlines.sweep() for process in processes))
    settled = Counter(name for process in processes for name in process.settled)

    assert Counter(names[:2000]) == settled
    assert sum(process.counted for process in processes) == 2000
    assert all(process.counted for process in processes)
    assert await store.timers.claim(9, now_ms=3999, until_ms=4000) == []
    assert await timer_count(store) == 8000


class Flaky:
    """A part of a store. Its commands fail before or after the server executes them, in the order that a test drew."""

    def __init__(self, part, failures) -> None:
        self._part, self._failures = part, failures

    def __getattr__(self, name):
        real = getattr(self._part, name)
        if name in {"timers", "groups", "queue"}:
            return Flaky(real, self._failures)
        if not asyncio.iscoroutinefunction(real):
            return real

        async def instead(*args, **named):
            failure = next(self._failures, "none")
            if failure == "before":
                raise StoreUnreachable("lost request")
            result = await real(*args, **named)
            if failure == "after":
                raise StoreUnreachable("lost response")
            return result

        return instead


@given(st.lists(st.sampled_from(["none", "none", "none", "before", "after"]), max_size=40), st.integers(1, 2))
async def test_after_any_failures_each_rollout_is_finished_once_and_its_group_completes(store, failures, members):
    """Processes that fail or die after any command leave what a later sweep completes."""
    clock = SetClock()
    flaky = Flaky(store, iter(failures))
    processes = [Process(flaky, clock), Process(flaky, clock), Process(store, clock)]
    for name in ("g", "h"):
        await store.groups.delete(name)
        for member in await open_group(store, name, members, deadline_s=2):
            await store.delete(member)
        await store.groups.delete(name)
    names = [name for group in ("g", "h") for name in await open_group(store, group, members, deadline_s=2)]
    clock.ms = 3000
    for _ in range(3):
        await asyncio.gather(*(process.deadlines.sweep() for process in processes[:2]), return_exceptions=True)
        clock.ms += LEASE_MS
    for _ in range(2):
        await processes[2].deadlines.sweep()
        clock.ms += LEASE_MS
    finished = [await ending(store, name) for name in names]
    queued = [entry.group for entry in (await store.queue.read(limit=99)).groups]
    for entry in (await store.queue.read(limit=99)).groups:
        await store.queue.claim(entry, "h", {}, lease_ms=1000, now_ms=1)
        await store.queue.remove(entry, "h", {}, now_ms=1)

    assert {(status, reason) for status, reason, _ in finished} == {("aborted", "deadline")}
    assert sorted(queued) == ["g", "h"]
    assert await timer_count(store) == 0
    assert all(count == 1 for count in Counter(name for process in processes for name in process.settled).values())
