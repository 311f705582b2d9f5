"""Completion of groups, also after a crash between two writes."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from tests.support.fakes import settings_for
from tests.support.forests import make_choice, make_step
from tests.support.session import names_in

from proxy.rollouts import finishing
from proxy.server.listener import running
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Span
from storage.types import StepWrite


async def crash_before_completion(proxy, store):
    """Finish all members of a group without marking the last one in the group."""
    members = await proxy.group("g", 1, None, finish=False)
    await proxy.finish(members[0], reward=1)
    await store.update_if(members[1], {"status": b'"completed"', "reward": b"0"}, expect={}, now_ms=1)
    return members


async def test_a_repeated_finish_completes_the_group_after_a_crash(proxy, store):
    _, member = await crash_before_completion(proxy, store)
    before = [group["status"] for group in (await proxy.get("/groups")).json["groups"]]
    repeated = await proxy.finish(member)

    assert before == ["open"]
    assert repeated.status == 200
    assert names_in(await proxy.claim()) == ["g"]


async def test_reading_the_group_completes_it_after_a_crash(proxy, store):
    await crash_before_completion(proxy, store)

    assert await proxy.status("g") == "complete"
    assert names_in(await proxy.claim()) == ["g"]


async def test_a_starting_process_completes_groups_after_a_crash(proxy, store):
    await crash_before_completion(proxy, store)
    async with running(settings_for(None), store):
        assert names_in(await proxy.claim(wait_s=20)) == ["g"]


async def test_a_starting_process_completes_groups_although_the_store_fails_meanwhile(proxy, store, monkeypatch):
    """It checks all groups again."""
    await crash_before_completion(proxy, store)
    monkeypatch.setattr(finishing, "_SETTLE_AGAIN_S", 0)
    names, failures = store.groups.names, iter([True, True])

    async def failing():
        if next(failures, False):
            await unreachable()
        async for name in names():
            yield name

    monkeypatch.setattr(store.groups, "names", failing)
    async with running(settings_for(None), store):
        assert names_in(await proxy.claim(wait_s=20)) == ["g"]
        assert None is next(failures, None)


async def test_a_finish_that_cannot_be_marked_in_the_group_is_503(proxy, store):
    """A retry completes the group."""
    (member,) = await proxy.group("g", None, finish=False)
    groups = store.groups
    mark, groups.mark = groups.mark, unreachable
    first = await proxy.finish(member)
    groups.mark = mark
    second = await proxy.finish(member)

    assert [first.status, second.status] == [503, 200]
    assert await proxy.status("g") == "complete"


async def unreachable(*_, **__):
    from storage.errors import StoreUnreachable

    raise StoreUnreachable("the test took the store away")


async def test_a_repeated_finish_does_not_queue_a_claimed_group_again(proxy):
    members = await proxy.group("g", 1, 1)
    batch = await proxy.claim()
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members))

    assert (await proxy.claim())["groups"] == []
    await proxy.ack(batch)
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members))
    assert (await proxy.claim())["groups"] == []


async def test_a_rollout_without_a_group_can_be_finished_and_one_of_a_deleted_group_is_404(proxy):
    """Deleting a group deletes its rollouts."""
    await proxy.chat("r1")
    (member,) = await proxy.group("g", None, finish=False)
    await proxy.post("/rollouts", {"rollout_id": "r2", "group_id": "h"})
    await proxy.delete("/groups/g")
    await proxy.delete("/groups/h")

    assert [(await proxy.finish(name)).status for name in ("r1", member, "r2")] == [200, 404, 404]


@pytest.mark.parametrize("fault", ["damaged", "versions", "reasons"])
async def test_a_group_with_an_unreadable_or_odd_rollout_can_be_completed_and_read(proxy, store, fault):
    """With an unreadable step it is not claimed; other groups are."""
    bad, good = await proxy.group("odd", 1, 0, finish=False)
    await proxy.group("good", 1, 0)
    stored = await store.get(bad)
    step = make_step(
        "0", [1], make_choice(0, [10], finish_reason={"type": "stop"}, spans=(Span(0, 1, 7),)), rollout_id=bad,
        response={"choices": [{"index": -1, "message": {"tool_calls": 5}}]}, request={"messages": [5, {"tool_calls": 5}]},
    )  # fmt: skip
    if fault == "versions":
        step = replace(step, choices=(replace(step.choices[0], finish_reason="stop"),))
    record = encode(step)
    entry = StepWrite(bad, stored.incarnation, "0", record.record, blocks=record.blocks)
    if fault == "damaged":
        entry = msgspec.structs.replace(entry, record=b"TT\x01 not a record")
    await store.append(entry, now_ms=1)
    finished = [(await proxy.finish(member, reward=1)).status for member in (bad, good)]
    group = await proxy.get("/groups/odd")
    shown = [
        (await proxy.get(f"/rollouts/{bad}{path}")).status
        for path in ("/steps", "/tree", "/export", "/export?format=steps")
    ]
    claimed = await proxy.claim(groups=10)
    exported = await proxy.get("/export?container=parquet&include=flagged")

    assert (finished, group.status, group.json["status"]) == ([200, 200], 200, "complete")
    assert (["good"] if fault == "damaged" else ["good", "odd"]) == sorted(
        group["group_id"] for group in claimed["groups"]
    )
    assert ([409] * 4 if fault == "damaged" else [200] * 4) == shown
    assert exported.status == 200
