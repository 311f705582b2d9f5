"""The pause of calls while the weights change."""

import asyncio
from contextlib import AsyncExitStack

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import Paused
from proxy.rollouts.policy import ABORT_ANNOUNCEMENT, Pause
from proxy.rollouts.stored_fields import of_policy
from storage.types import Announcement


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
    second.in_flight = 1
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
    await pause.passed()
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


class Shared:
    """The announcements and heartbeats of a store, without its network."""

    def __init__(self) -> None:
        self.announced, self.beats = {}, {}

    async def announce(self, name, value):
        self.announced[name] = Announcement(value, self.announced[name].number + 1 if name in self.announced else 1)
        return self.announced[name]

    async def heartbeat(self, name, value, *, lifetime_ms):
        self.beats[name] = value
        return dict(self.announced), dict(self.beats)


@given(st.lists(st.sampled_from(["pause", "resume", "abort", "beat"]), max_size=12))
def test_a_pause_stops_calls_if_it_is_aborted_and_no_other_pause_does(actions):
    """Every heartbeat of a process stops calls while the pause that it knows is the aborted one."""

    async def run():
        shared, stopped, aborted = Shared(), [], {0}
        here, there = (Pause(shared, name, max_waiting=1, timeout_s=1) for name in "ab")
        there.abort_calls = lambda: stopped.append(there.number) or 0
        for action in actions:
            if action == "abort" and here.number:
                await shared.announce(ABORT_ANNOUNCEMENT, orjson.dumps(here.number))
                aborted.add(here.number)
            elif action == "beat":
                stopped.clear()
                await there.beat()
                assert here.number == there.number
                assert aborted.issuperset(stopped)
                assert (here.number in aborted - {0}) == (here.number in stopped)
            elif action in {"pause", "resume"}:
                await here.announce("wait" if action == "pause" else None)

    asyncio.run(run())


ACTIONS = ("call", "end", "pause", "reject", "resume", "abort", "beat")


class Processes:
    """Two processes that share announcements and heartbeats, with a pause for each policy, and calls in flight."""

    def __init__(self, policies) -> None:
        self.shared = Shared()
        self.stopped, self.calls = [], {}
        for name in policies:
            for process in "ab":
                pause = Pause(self.shared, process, policy=name, max_waiting=1, timeout_s=1)
                pause.abort_calls = lambda key=(process, name): self.stopped.append(key) or 0
                self.calls[process, name] = (pause, [])

    async def act(self, process, policy, action):
        """Return what the action changes, as its process sees it."""
        pause, calls = self.calls[process, policy]
        if action == "call" and pause.mode is None:
            calls.append(pause)
            pause.in_flight += 1
        elif action == "end" and calls:
            calls.pop().in_flight -= 1
        elif action in {"pause", "reject", "resume"}:
            await pause.announce({"pause": "wait", "reject": "reject", "resume": None}[action])
        elif action == "abort":
            await self.shared.announce(of_policy(ABORT_ANNOUNCEMENT, policy), orjson.dumps(pause.number))
        elif action == "beat":
            return await pause.beat(), pause.mode
        return pause.mode


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["default", "planner"]), st.sampled_from(ACTIONS)), max_size=30
    )
)
def test_a_policy_is_paused_counted_and_aborted_as_if_it_were_alone(actions):
    """Actions on one policy have the same effects with those on the other between them as without."""

    async def run(policies):
        processes = Processes(policies)
        seen = [(step, await processes.act(*step)) for step in actions if step[1] in policies]
        return seen, processes.stopped

    async def law():
        seen, stopped = await run(["default", "planner"])
        for policy in ("default", "planner"):
            alone, stopped_alone = await run([policy])
            assert alone == [(step, result) for step, result in seen if step[1] == policy]
            assert stopped_alone == [key for key in stopped if key[1] == policy]

    asyncio.run(law())


async def test_two_policies_of_one_store_are_paused_independently(store):
    """Calls of the other policy are neither held nor counted, in any process; every heartbeat is one of its policy."""
    made = {
        (process, policy): Pause(store.announcements, process, policy=policy, max_waiting=1, timeout_s=60)
        for process in "ab"
        for policy in ("default", "planner")
    }
    async with AsyncExitStack() as stack:
        for pause in made.values():
            await pause.start()
            stack.push_async_callback(pause.close)
        made["b", "default"].in_flight = 1
        assert (0, True) == await made["a", "planner"].drained("wait", drain_s=0)
        assert (1, False) == await made["a", "default"].drained("reject", drain_s=0)
        assert ["reject", "wait"] * 2 == [pause.mode for pause in made.values()]
        waiting = asyncio.create_task(made["b", "planner"].passed())
        await made["b", "default"].announce(None)
        await made["b", "default"].passed()
        assert not waiting.done()
        await made["a", "planner"].announce(None)
        await waiting
