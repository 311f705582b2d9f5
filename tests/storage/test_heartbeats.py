"""The heartbeats of processes and the roles that one of them has, on every kind of server."""

import asyncio
from secrets import token_hex

import orjson
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
    assert first.counts == {"default": (3, 0), "planner": (5, 0)}
    assert second.counts == {"default": (4, 1)}
    assert (await beat(store, "a", default=(4, 5), planner=(0, 1))).counts == {"default": (6, 0), "planner": (1, 0)}
    await beat(store, "a", 0)
    assert (await beat(store, "b", default=(4, 1))).counts == {"default": (1, 0)}

    await beat(store, "c", 1, default=(1, 100))
    await asyncio.sleep(0.01)
    assert (await beat(store, "b", default=(4, 1), planner=(0, 0))).counts == {"default": (1, 0), "planner": (0, 0)}


async def test_a_heartbeat_returns_the_announcements_that_the_process_does_not_know(store):
    """Each announcement increases the number by which they are compared."""
    policy = await store.announcements.announce("policy", b"1")
    first = await beat(store, "a")
    again = await beat(store, "a", known=first.known)
    other = await store.announcements.announce("other", b"1")
    later = await beat(store, "a", known=first.known)

    assert (first.announcements, again.announcements) == ({"policy": policy}, None)
    assert later.announcements == {"policy": policy, "other": other}
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
        assert (await beat(store, process, **states)).counts == expected


async def test_a_role_has_one_process_at_a_time(store):
    """Until its lifetime ends or it gives the role up."""

    async def lead(process, lifetime_ms=60_000):
        return await store.announcements.lead("archive", process, lifetime_ms=lifetime_ms)

    assert [await lead("a"), await lead("a"), await lead("b")] == [True, True, False]
    assert [await lead("b", 0), await lead("a", 0), await lead("b", 1)] == [False, True, True]
    await asyncio.sleep(0.01)
    assert await lead("a")


async def test_the_cost_of_a_heartbeat_does_not_grow_with_the_number_of_processes(redis_server, opened):
    """Nor does its reply: the commands of its script are the same with 10 and with 1,000 processes."""
    store = await opened(redis_server.url, prefix=token_hex(8))
    await store.announcements.announce("pause", b'"wait"')
    costs = []
    with redis_server.client as client:
        for count in (10, 1000):
            beats = [
                await beat(store, f"p{number}", default=(number % 2, 1), planner=(0, 0)) for number in range(count)
            ]
            before = commands(client)
            counts = (await beat(store, "p0", known=beats[-1].known, default=(1, 2), planner=(0, 0))).counts
            costs.append(commands(client) - before)
            assert counts == {"default": (count + 1, count // 2 - 1), "planner": (0, 0)}
            await beat(store, "p0", known=beats[-1].known, default=(0, 1), planner=(0, 0))

    assert costs[1] <= costs[0] + 1  # the expiry of a key is set if it is another


async def test_a_heartbeat_without_a_change_is_as_many_commands_with_many_policies(redis_server, opened):
    """What 0.1.0 reads of them is written in one command, and only if it has changed or would expire."""
    store = await opened(redis_server.url, prefix=token_hex(8))
    costs = []
    with redis_server.client as client:
        for count in (1, 32):
            states = {f"policy-{number}": (1, number) for number in range(count)}
            for _ in range(2):
                before = commands(client)
                await beat(store, "a", **states)
                costs.append(commands(client) - before)

    assert costs[3] <= costs[1] + 2, costs


def commands(client):
    """Return how many commands the server has run, with those of scripts, without INFO."""
    stats = client.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")


@pytest.fixture
async def older(redis_server, opened):
    """Return a store, and a function that sends a heartbeat as 0.1.0 does."""
    store = await opened(redis_server.url, prefix=token_hex(8))
    key = store.layout.buckets[0].heartbeats
    with redis_server.client as client:

        def send(name, number, calls, lifetime_ms=60_000):
            client.hset(key, name, b"%015d" % (1000 * client.time()[0] + lifetime_ms) + b"[%d,%d]" % (number, calls))

        def seen():
            """Return what a heartbeat of 0.1.0 returns."""
            return {name.decode(): orjson.loads(value[15:]) for name, value in client.hgetall(key).items()}

        yield store, send, seen


async def test_processes_of_the_last_release_are_counted(older):
    """By policy, until their lifetime ends."""
    store, send, _ = older
    send("old", 1, 5)
    send("old:planner", 3, 7)
    send("gone", 0, 100, lifetime_ms=-2000)
    first = await beat(store, "new", default=(2, 1), planner=(3, 0))

    assert first.counts == {"default": (6, 1), "planner": (7, 0)}


async def test_processes_of_the_last_release_see_all_others_as_one(older):
    """With all their calls in flight, and the oldest number that one of them knows."""
    store, send, seen = older
    send("old", 1, 5)
    await beat(store, "a", default=(2, 1), planner=(4, 2))
    await beat(store, "b", default=(3, 4))
    both = seen()
    await beat(store, "a", 0)
    one = seen()
    await beat(store, "b", 0)

    assert both == {"old": [1, 5], "~": [2, 5], "~:planner": [4, 2]}
    assert one == {"old": [1, 5], "~": [3, 4]}
    assert seen() == {"old": [1, 5]}
