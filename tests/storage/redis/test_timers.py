"""Timers of rollouts: claims, moves, and whose turn it is to claim."""

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import StoreUnreachable
from storage.redis.keys import Layout
from storage.redis.timers import Timers
from storage.types import Origin, StepWrite, Timer


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """Return an empty store."""
    return await opened(url_of(request.param))


HOSTILE_TIMERS = ("a b", "a", "%20", "{a}", "a\nb", "🙂", "\ud800", "x" * 256)


async def timed(store, name, timer_ms):
    """Open a rollout with a timer and return the timer."""
    return Timer(name, (await store.open(name, {}, now_ms=1, timer_ms=timer_ms)).incarnation)


async def times(store):
    """Return all timers with their times, which are below 40."""
    found: dict[Timer, int] = {}
    for time_ms in range(40):
        found |= dict.fromkeys(await store.timers.claim(1000, now_ms=time_ms, until_ms=10**9), time_ms)
    return found


async def test_a_rollout_is_created_with_its_timer(store):
    """Opening it again changes nothing; a rollout without a timer has none. Names may have any characters."""
    timers = [await timed(store, name, 5) for name in HOSTILE_TIMERS]
    for name in HOSTILE_TIMERS:
        await store.open(name, {"a": b"1"}, now_ms=2, timer_ms=1)
    await store.open("other", {"a": b"1"}, now_ms=1)

    assert await store.timers.claim(9, now_ms=4, until_ms=9) == []
    assert Counter(timers) == Counter(await store.timers.claim(9, now_ms=5, until_ms=9))
    assert (await store.get("other")).fields == {"a": b"1"}


async def test_the_rollouts_of_a_group_are_created_with_their_timers(store):
    """The group has none. A group without timers has none either."""
    members = [f"r{number}" for number in range(5000) if store.same_slot("g", f"r{number}")]
    rollouts = {name: {"b": b"2"} for name in members[:3]}
    await store.open_group("g", {"a": b"1"}, rollouts, now_ms=1, timer_ms=7)
    await store.open_group("h", {}, {}, now_ms=1, timer_ms=7)
    await store.open_group("g2", {}, {}, now_ms=1)
    claimed = await store.timers.claim(9, now_ms=7, until_ms=9)

    assert sorted(members[:3]) == sorted(timer.rollout for timer in claimed)
    assert all([(await store.get(name)).incarnation == incarnation for name, incarnation in claimed])
    assert [(await store.get(name)).fields for name in members[:3]] == [{"b": b"2"}] * 3
    assert await store.groups.timers.claim(9, now_ms=9, until_ms=9) == []


async def test_a_claimed_timer_is_not_claimed_again_before_its_new_time(store):
    """Of many concurrent claims one gets it; after that time another claim gets it, as the first process may have died."""
    timer = await timed(store, "r", 5)
    claims = await asyncio.gather(*(store.timers.claim(9, now_ms=6, until_ms=20) for _ in range(10)))

    assert [found for claim in claims for found in claim] == [timer]
    assert await store.timers.claim(9, now_ms=19, until_ms=30) == []
    assert await store.timers.claim(9, now_ms=20, until_ms=30) == [timer]


async def test_a_timer_is_moved_or_removed_unless_it_was_set_meanwhile(store):
    first, second, third = [await timed(store, name, 5) for name in "abc"]
    await store.timers.claim(9, now_ms=5, until_ms=8)
    await store.timers.move({third: 9}, from_ms=8)
    await store.timers.move({first: 6, second: None, third: None, Timer("none", "x"): 4}, from_ms=8)

    assert await times(store) == {first: 6, third: 9}


async def test_a_removed_timer_is_not_claimed(store):
    """Removing it again is no error; the timer of another incarnation stays."""
    timer = await timed(store, "r", 5)
    await store.timers.remove(Timer("r", "other"))
    before = await store.timers.claim(9, now_ms=5, until_ms=6)
    await store.timers.remove(timer)
    await store.timers.remove(timer)

    assert before == [timer]
    assert await times(store) == {}


async def test_a_deleted_rollout_has_no_timer_and_one_that_is_opened_again_has_its_own(store):
    before = await timed(store, "r", 5)
    await store.delete("r")
    after = await timed(store, "r", 7)

    assert before != after
    assert await times(store) == {after: 7}
    await store.delete("r")
    await store.delete("r")
    assert await times(store) == {}


@pytest.mark.parametrize("store", ["redis", "cluster"], indirect=True)
async def test_a_restored_rollout_has_a_timer_that_has_expired(store, opened, url_of, request):
    """Who looked at it while it was gone may have removed its timer."""
    mortal = await opened(url_of(request.node.callspec.params["store"]), ttl_s=1000)
    timer = await timed(mortal, "r", 10**12)
    for key in mortal.layout.rollout("r").all[:5]:
        await mortal._servers.execute(key, [("DEL", key)])
    await mortal.timers.remove(timer)
    await mortal.append(StepWrite("r", timer.incarnation, "s1", b"1", origin=Origin(1)), now_ms=2)

    assert await mortal.timers.claim(9, now_ms=1, until_ms=2) == [timer]


@pytest.mark.parametrize("store", ["redis"], indirect=True)
async def test_ten_thousand_timers_are_claimed_in_parts(store):
    """The earliest of each part are first, and two processes share them."""
    names = [f"r{number}" for number in range(10_000)]
    for start in range(0, len(names), 500):
        await asyncio.gather(*(timed(store, name, 10 + start) for name in names[start : start + 500]))
    claimed: list[str] = []
    while found := await asyncio.gather(*(store.timers.claim(50, now_ms=10**5, until_ms=10**6) for _ in range(2))):
        part = [timer.rollout for claim in found for timer in claim]
        if not part:
            break
        assert len(part) <= 2 * 16 * 50
        claimed += part

    assert sorted(names) == sorted(claimed)


@given(
    st.lists(
        st.tuples(st.just("claim"), st.integers(0, 30), st.integers(0, 30))
        | st.tuples(st.just("move"), st.integers(0, 5), st.none() | st.integers(0, 30), st.integers(0, 30))
        | st.tuples(st.just("remove"), st.integers(0, 5))
        | st.tuples(st.just("open"), st.integers(0, 5), st.integers(0, 30))
        | st.tuples(st.just("delete"), st.integers(0, 5))
    )
)
async def test_timers_are_a_map_of_incarnations_to_times(on_redis, command, operations):
    """Any operations have the results that they have on a dictionary."""
    await command(on_redis, "FLUSHALL")
    expected: dict[Timer, int] = {}
    known: dict[int, Timer] = {}
    for verb, *values in operations:
        if verb == "claim":
            due = [timer for timer, time_ms in expected.items() if time_ms <= values[0]]
            expected |= dict.fromkeys(due, values[1])
            assert Counter(due) == Counter(await on_redis.timers.claim(99, now_ms=values[0], until_ms=values[1]))
        elif verb == "open":
            stored = await on_redis.open(str(values[0]), {}, now_ms=1, timer_ms=values[1])
            known[values[0]] = timer = Timer(stored.name, stored.incarnation)
            expected |= {timer: values[1]} if stored.created else {}
        elif verb == "delete":
            expected = {timer: at for timer, at in expected.items() if timer.rollout != str(values[0])}
            await on_redis.delete(str(values[0]))
        elif timer := known.get(values[0]):
            if verb == "remove":
                expected.pop(timer, None)
                await on_redis.timers.remove(timer)
                continue
            if expected.get(timer) == values[2]:
                del expected[timer]
                expected |= {} if values[1] is None else {timer: values[1]}
            await on_redis.timers.move({timer: values[1]}, from_ms=values[2])

    assert await times(on_redis) == expected


async def test_one_caller_has_the_turn_at_a_time(store, until):
    """It ends by itself, so that another one has it if the caller died."""
    turns = await asyncio.gather(*(store.timers.has_turn(100) for _ in range(20)))
    await until(partial(store.timers.has_turn, 10**6))

    assert sum(turns) == 1
    assert not await store.timers.has_turn(1)


async def test_parts_that_fail_do_not_hide_the_timers_of_others():
    """If no other part has a timer, the claim raises the error."""

    async def run_each(calls):
        _, (_, _, (now_ms, *_)), *others = calls
        return [StoreUnreachable("this server is down"), [b"r b"] if now_ms == 5 else [], *([] for _ in others)]

    timers = Timers(None, run_each, Layout("tt"))

    assert [Timer("r", "b")] == await timers.claim(9, now_ms=5, until_ms=6)
    with pytest.raises(StoreUnreachable):
        await timers.claim(9, now_ms=4, until_ms=6)
    assert repr(timers) == "<Timers under tt>"
