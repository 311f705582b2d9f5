"""When a group is complete, also where a process died between two steps."""

import asyncio
from dataclasses import replace

import pytest
from fakes import settings_for
from forests import make_choice, make_step

from proxy.server.listener import running
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Span
from storage.types import StepWrite


async def left_by_a_crash(proxy, store):
    """A group whose members are finished, and that was not told of the last of them."""
    members = await proxy.group("g", 1, None, finish=False)
    await proxy.finish(members[0], reward=1)
    await store.update_if(members[1], {"status": b'"completed"'}, expect={}, now_ms=1)
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
    from storage.errors import StoreUnreachable

    raise StoreUnreachable("the test took the store away")


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


@pytest.mark.parametrize("odd", ["damaged", "versions", "reasons"])
async def test_a_group_with_an_odd_rollout_is_finished_shown_and_complete(proxy, store, odd):
    """Its oldest version is not known where a step cannot be read; the other groups are claimed."""
    bad, good = await proxy.group("odd", 1, 0, finish=False)
    await proxy.group("good", 1, 0)
    stored = await store.get(bad)
    step = make_step(
        "0", [1], make_choice(0, [10], finish_reason={"type": "stop"}, spans=(Span(0, 1, 7),)), rollout_id=bad,
        response={"choices": [{"index": -1, "message": {"tool_calls": 5}}]}, request={"messages": [5, {"tool_calls": 5}]},
    )  # fmt: skip
    if odd == "versions":
        step = replace(step, choices=(replace(step.choices[0], finish_reason="stop"),))
    record = encode(step)
    entry = StepWrite(bad, stored.incarnation, "0", record.record, blocks=record.blocks)
    if odd == "damaged":
        entry = replace(entry, record=b"TT\x01 not a record")
    await store.append(entry, now_ms=1)
    finished = [(await proxy.finish(member, reward=1)).status for member in (bad, good)]
    group = await proxy.get("/groups/odd")
    shown = [
        (await proxy.get(f"/rollouts/{bad}{path}")).status
        for path in ("/steps", "/tree", "/export", "/export?format=steps")
    ]
    claimed = await proxy.claim(groups=10)
    exported = await proxy.get("/export?container=parquet&include=flagged")

    assert ([200, 200], 200, "complete") == (finished, group.status, group.json["status"])
    assert (["good"] if odd == "damaged" else ["good", "odd"]) == sorted(one["group_id"] for one in claimed["groups"])
    assert ([409] * 4 if odd == "damaged" else [200] * 4) == shown
    assert 200 == exported.status
