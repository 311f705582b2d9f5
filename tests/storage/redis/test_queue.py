"""What `Queue` promises, on every kind of server it runs on."""

import asyncio
from dataclasses import replace

import pytest

from storage.errors import FieldsChanged
from storage.types import MAX_LEASE_MS

LONG = {"lease_ms": 60_000, "now_ms": 9}
SHORT = {"lease_ms": 30, "now_ms": 9}


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """An empty store."""
    return await opened(url_of(request.param))


async def offered(store, *names):
    """Groups, made and offered, as they wait."""
    for name in names:
        await store.open_group(name, {}, {}, now_ms=1)
        await store.queue.enqueue(name, b"note " + name.encode(), {"status": b"1"}, expect={"status": None}, now_ms=2)
    return {waiting.group: waiting for waiting in await store.queue.list_available(1000)}


async def field(store, name, group="g"):
    return (await store.groups.get(group)).fields.get(name)


async def test_an_offered_group_waits_with_its_note_and_its_fields_are_set(store):
    """All of it at once; a group that is not there cannot be offered."""
    waiting = (await offered(store, "g"))["g"]

    assert b"note g" == waiting.note
    assert b"1" == await field(store, "status")
    assert await store.queue.enqueue("none", b"", {}, expect={}, now_ms=1) is None


async def test_a_group_is_offered_once_if_it_is_expected_to_be_unoffered(store):
    """Of many that offer it at once, one does, and the others learn how it stands."""
    await store.open_group("g", {}, {}, now_ms=1)

    async def offer():
        try:
            await store.queue.enqueue("g", b"", {"status": b"1"}, expect={"status": None}, now_ms=2)
        except FieldsChanged as changed:
            return changed.rollout.fields
        return "offered"

    told = await asyncio.gather(*(offer() for _ in range(10)))

    assert 1 == told.count("offered")
    assert 9 == told.count({"status": b"1"})
    assert 1 == len(await store.queue.list_available(10))


async def test_groups_wait_in_the_order_they_were_offered(store):
    """Whichever bucket they lie in; those of one millisecond in any order."""
    names = [f"g{n}" for n in range(40)]
    waiting = await offered(store, *names)
    ages = [int(one.entry_id.partition("-")[0]) for one in waiting.values()]
    by_name = [int(waiting[name].entry_id.partition("-")[0]) for name in names]

    assert sorted(ages) == ages == by_name
    assert ages[:3] == [int(one.entry_id.partition("-")[0]) for one in await store.queue.list_available(3)][:3]


async def test_of_many_that_take_a_group_at_once_one_holds_it(store):
    """Exactly one, and the fields are its own."""
    waiting = (await offered(store, "g"))["g"]

    taken = await asyncio.gather(
        *(store.queue.claim(waiting, f"h{n}", {"held_by": b"h%d" % n}, **LONG) for n in range(20))
    )

    assert 1 == sum(taken)
    assert b"h%d" % taken.index(True) == await field(store, "held_by")
    assert [] == await store.queue.list_available(10)


async def test_taking_again_is_taking_once(store):
    """Whose answer was lost asks again, and holds it."""
    waiting = (await offered(store, "g"))["g"]

    assert await store.queue.claim(waiting, "h", {}, **LONG)
    assert await store.queue.claim(waiting, "h", {}, **LONG)
    assert not await store.queue.claim(waiting, "other", {}, **LONG)


async def test_a_lease_that_ran_out_gives_the_group_to_another(store, until):
    """The first holder can then neither extend, nor give back, nor remove it, and changes nothing by trying."""
    waiting = (await offered(store, "g"))["g"]
    await store.queue.claim(waiting, "h", {"held_by": b"h"}, **SHORT)
    assert not await store.queue.claim(waiting, "early", {}, **LONG)
    await until(lambda: store.queue.claim(waiting, "next", {"held_by": b"next"}, **LONG))

    assert not await store.queue.extend(waiting, "h", {"held_by": b"h"}, **LONG)
    assert not await store.queue.release(waiting, "h", {"held_by": None}, now_ms=9)
    assert not await store.queue.remove(waiting, "h", {"held_by": None}, now_ms=9)
    assert b"next" == await field(store, "held_by")
    assert await store.queue.remove(waiting, "next", {}, now_ms=9)


async def test_a_lease_that_ran_out_is_still_good_while_nobody_else_took_the_group(store, until):
    """What was worked on is not thrown away for being late."""
    waiting = (await offered(store, "g"))["g"]
    await store.queue.claim(waiting, "h", {}, **SHORT)

    async def waits_again():
        return [waiting] == await store.queue.list_available(1)

    await until(waits_again)

    assert await store.queue.extend(waiting, "h", {}, **LONG)
    assert [] == await store.queue.list_available(1)
    assert await store.queue.remove(waiting, "h", {}, now_ms=9)


async def test_what_is_given_back_waits_in_its_old_place(store):
    """The longest waiting is the longest waiting."""
    waiting = await offered(store, "a", "b")
    await store.queue.claim(waiting["a"], "h", {}, **LONG)

    assert await store.queue.release(waiting["a"], "h", {"given_back": b"1"}, now_ms=9)
    assert ["a", "b"] == [one.group for one in await store.queue.list_available(10)]
    assert b"1" == await field(store, "given_back", "a")


async def test_what_is_removed_is_gone_for_good(store, command):
    """Removing twice removes once; the queue keeps neither an entry nor a holder's name."""
    waiting = (await offered(store, "g"))["g"]
    await store.queue.claim(waiting, "h", {}, **LONG)

    assert await store.queue.remove(waiting, "h", {"status": b"2"}, now_ms=9)
    assert not await store.queue.remove(waiting, "h", {"status": b"3"}, now_ms=9)
    assert not await store.queue.claim(waiting, "h", {}, **LONG)
    assert b"2" == await field(store, "status")
    assert [] == await store.queue.list_available(10)


async def test_holders_leave_no_trace(store, until, on_redis, command):
    """Of a hundred holders only nobody's name is left."""
    waiting = (await offered(on_redis, "g"))["g"]
    for number in range(100):
        await on_redis.queue.claim(waiting, f"h{number}", {}, **LONG)
        await on_redis.queue.release(waiting, f"h{number}", {}, now_ms=9)
    (key,) = (await command(on_redis, "KEYS", "*:queue"))[0]

    assert [b"-"] == [consumer[1] for consumer in (await command(on_redis, "XINFO", "CONSUMERS", key, "holders"))[0]]


async def test_a_group_that_was_deleted_leaves_the_queue_when_it_is_taken(store):
    """And is not brought back to life by it."""
    waiting = (await offered(store, "g"))["g"]
    await store.groups.delete("g")

    assert not await store.queue.claim(waiting, "h", {"held_by": b"h"}, **LONG)
    assert await store.groups.get("g") is None
    assert [] == await store.queue.list_available(10)


async def test_a_queue_that_was_never_used_has_nothing_to_take(store):
    """Asking changes nothing."""
    waiting = (await offered(store, "g"))["g"]
    elsewhere = replace(waiting, group="other")

    assert not await store.queue.claim(elsewhere, "h", {}, **LONG)
    assert [waiting] == await store.queue.list_available(10)


@pytest.mark.parametrize("lease_ms", [0, -1, MAX_LEASE_MS + 1])
async def test_a_lease_out_of_bounds_is_refused(on_redis, lease_ms):
    """A day is the longest."""
    waiting = (await offered(on_redis, "g"))["g"]

    with pytest.raises(ValueError, match="lease"):
        await on_redis.queue.claim(waiting, "h", {}, lease_ms=lease_ms, now_ms=1)


async def test_groups_that_outlived_their_time_leave_the_queue(url_of, opened, until):
    """With a ttl, taking one whose group expired removes it."""
    store = await opened(url_of("redis"), ttl_s=1)
    waiting = (await offered(store, "g"))["g"]

    async def is_gone():
        return await store.groups.get("g") is None

    await until(is_gone)

    assert not await store.queue.claim(waiting, "h", {}, **LONG)
    assert [] == await store.queue.list_available(10)
