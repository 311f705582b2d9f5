"""The announced policy version, and pauses that abort calls."""

import asyncio

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.rollouts.pause import ABORT_ANNOUNCEMENT, Pause
from proxy.rollouts.policy import POLICY_ANNOUNCEMENT, PolicyVersion, read_version
from storage.types import Announcement


def notices(version, number):
    return {POLICY_ANNOUNCEMENT: Announcement(orjson.dumps(version), number)}


def test_a_version_is_read_from_announcements():
    """It is None if none was announced."""
    assert None is read_version({})
    assert "7" == read_version(notices("7", 1))


def test_an_older_announcement_does_not_replace_a_newer_one():
    """Replies of the store may arrive out of order."""
    policy = PolicyVersion()
    versions = [policy.current]
    for announcements in ({}, notices("2", 2), notices("1", 1), notices("3", 3), {}):
        policy.apply(announcements)
        versions.append(policy.current)

    assert [None, None, "2", "2", "3", "3"] == versions


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
