"""The heartbeats of processes and the roles that one of them has, on every kind of server."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """Return an empty store."""
    return await opened(url_of(request.param))


async def beat(store, process, lifetime_ms=60_000, *, known=0, **states):
    return await store.announcements.beat(process, states, lifetime_ms=lifetime_ms, known=known)


async def test_a_heartbeat_counts_until_its_lifetime_ends(store):
    """Each returns the sums of all, and how many know an older number; a lifetime of 0 ends at once."""
    first = await beat(store, "a", default=(2, 3), planner=(0, 5))
    second = await beat(store, "b", default=(4, 1))
    assert {"default": (3, 0), "planner": (5, 0)} == first.counts
    assert {"default": (4, 1)} == second.counts
    assert {"default": (6, 0), "planner": (1, 0)} == (await beat(store, "a", default=(4, 5), planner=(0, 1))).counts
    await beat(store, "a", 0)
    assert {"default": (1, 0)} == (await beat(store, "b", default=(4, 1))).counts

    await beat(store, "c", 1, default=(1, 100))
    await asyncio.sleep(0.01)
    assert {"default": (1, 0), "planner": (0, 0)} == (await beat(store, "b", default=(4, 1), planner=(0, 0))).counts


async def test_a_heartbeat_returns_the_announcements_that_the_process_does_not_know(store):
    """Each announcement increases the number by which they are compared."""
    policy = await store.announcements.announce("policy", b"1")
    first = await beat(store, "a")
    again = await beat(store, "a", known=first.known)
    other = await store.announcements.announce("other", b"1")
    later = await beat(store, "a", known=first.known)

    assert ({"policy": policy}, None) == (first.announcements, again.announcements)
    assert {"policy": policy, "other": other} == later.announcements
    assert first.known == again.known < later.known


STATES = st.dictionaries(st.sampled_from(["default", "planner"]), st.tuples(st.integers(0, 3), st.integers(0, 9)))


@given(st.lists(st.tuples(st.sampled_from("abc"), STATES), max_size=12))
async def test_heartbeats_return_the_sums_of_what_each_process_sent_last(store, sent):
    """Whatever was sent before."""
    for process in "abc":
        await beat(store, process, 0)
    latest = {}
    for process, states in sent:
        latest[process] = states
        others = {policy: [known[policy] for known in latest.values() if policy in known] for policy in states}
        expected = {
            policy: (sum(calls for _, calls in found), sum(number < states[policy][0] for number, _ in found))
            for policy, found in others.items()
        }
        assert expected == (await beat(store, process, **states)).counts


async def test_a_role_has_one_process_at_a_time(store):
    """Until its lifetime ends or it gives the role up."""

    async def lead(process, lifetime_ms=60_000):
        return await store.announcements.lead("archive", process, lifetime_ms=lifetime_ms)

    assert [True, True, False] == [await lead("a"), await lead("a"), await lead("b")]
    assert [False, True, True] == [await lead("b", 0), await lead("a", 0), await lead("b", 1)]
    await asyncio.sleep(0.01)
    assert await lead("a")
