"""When a group is complete, also where a process died between two steps."""

import asyncio

from fakes import settings_for

from proxy.server import running


async def left_by_a_crash(proxy, store):
    """A group whose members are finished, and that was not told of the last of them."""
    members = await proxy.group("g", 1, None, finish=False)
    await proxy.finish(members[0], reward=1)
    await store.amend(members[1], {"status": b'"completed"'}, expect={}, now_ms=1)
    return members


async def test_a_finish_that_is_asked_again_makes_good_what_a_crash_left(proxy, store):
    """Whoever got no answer asks again."""
    _, member = await left_by_a_crash(proxy, store)
    before = [group["status"] for group in (await proxy.get("/groups")).json["groups"]]
    again = await proxy.finish(member)

    assert ["open"] == before
    assert 200 == again.status
    assert ["g"] == [group["group_id"] for group in (await proxy.claim())["groups"]]


async def test_a_look_at_the_group_makes_it_good(proxy, store):
    """And is what people do who wonder."""
    await left_by_a_crash(proxy, store)

    assert "complete" == await proxy.status("g")
    assert ["g"] == [group["group_id"] for group in (await proxy.claim())["groups"]]


async def test_a_process_that_starts_makes_it_good(proxy, store):
    """For those whom nobody asks about."""
    await left_by_a_crash(proxy, store)
    async with running(settings_for(None), store):
        assert ["g"] == [group["group_id"] for group in (await proxy.claim(wait_s=20))["groups"]]


async def test_a_finish_that_could_not_be_told_to_the_group_is_not_told_to_be_done(proxy, store):
    """503; asked again, it is."""
    (member,) = await proxy.group("g", None, finish=False)
    groups = store.groups
    mark, groups.mark = groups.mark, away
    first = await proxy.finish(member)
    groups.mark = mark
    second = await proxy.finish(member)

    assert [503, 200] == [first.status, second.status]
    assert "complete" == await proxy.status("g")


async def away(*_, **__):
    from storage.store import StoreAway

    raise StoreAway("the test took the store away")


async def test_a_claimed_group_is_not_offered_again_by_a_late_finish(proxy):
    """What is done again changes nothing."""
    members = await proxy.group("g", 1, 1)
    batch = await proxy.claim()
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members))

    assert [] == (await proxy.claim())["groups"]
    await proxy.post(f"/batches/{batch['batch_id']}/ack")
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members))
    assert [] == (await proxy.claim())["groups"]


async def test_a_rollout_of_no_group_is_finished_all_the_same(proxy):
    """And so is one whose group was deleted."""
    await proxy.chat("r1")
    (member,) = await proxy.group("g", None, finish=False)
    await proxy.post("/rollouts", {"rollout_id": "r2", "group_id": "h"})
    await proxy.delete("/groups/g")
    await proxy.delete("/groups/h")

    assert [200, 404, 404] == [(await proxy.finish(name)).status for name in ("r1", member, "r2")]
