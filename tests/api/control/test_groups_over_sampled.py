"""Over-sampled groups: complete once `size` of their rollouts have a reward; the others are surplus."""

import asyncio

import pytest
from tests.support.fakes import fake_engine, proxying
from tests.support.session import Session
from tests.support.stored import stored_rollout, wait_for_steps


async def over_sampled(proxy, size=2, over_sample=2, **fields):
    opened = await proxy.post("/groups", {"group_id": "g", "size": size, "over_sample": over_sample, **fields})
    assert opened.status == 201, opened.text
    return [rollout["rollout_id"] for rollout in opened.json["rollouts"]]


async def endings(proxy):
    shown = (await proxy.get("/groups/g")).json["rollouts"]
    return [(rollout["status"], rollout.get("reason")) for rollout in shown]


async def test_the_group_is_complete_once_its_size_has_rewards(proxy):
    """The other rollouts are finished as surplus, and named in the claim."""
    members = await over_sampled(proxy)
    for member in members[:3]:
        await proxy.chat(member)
    await proxy.finish(members[0], reward=0)
    await proxy.finish(members[1])
    before = await proxy.status("g")
    await proxy.finish(members[2], reward=1)
    claimed = (await proxy.claim())["groups"][0]

    assert before == "open"
    done, surplus = ("completed", None), ("aborted", "surplus")
    assert await endings(proxy) == [done, done, done, surplus]
    assert [members[0], members[2]] == claimed["rollouts"]
    assert {members[1], members[3]} == {entry["rollout_id"] for entry in claimed["skipped"]}


async def test_a_reward_after_the_finish_completes_the_group(proxy):
    members = await over_sampled(proxy, 1, 1)
    await proxy.finish(members[0])
    before = await proxy.status("g")
    await proxy.patch(f"/rollouts/{members[0]}", {"reward": 1})

    assert [before, await proxy.status("g")] == ["open", "complete"]
    assert await endings(proxy) == [("completed", None), ("aborted", "surplus")]


async def test_of_more_rewarded_rollouts_those_count_that_were_finished_first(proxy):
    """Also if one of the others gets its reward later: the claim freezes the rewards of all."""
    members = await over_sampled(proxy, 2, 3)
    for member in members:
        await proxy.chat(member)
    await proxy.finish(members[4])
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members[:4]))
    finished = {member: (await proxy.get(f"/rollouts/{member}")).json for member in members}
    rewarded = sorted(
        (rollout["finished_ms"], member) for member, rollout in finished.items() if rollout["reward"] is not None
    )
    first = await proxy.claim()
    late = await proxy.patch(f"/rollouts/{members[4]}", {"reward": 1})
    await proxy.release(first)

    assert {member for _, member in rewarded[:2]} == set(first["groups"][0]["rollouts"])
    assert late.status == 409
    assert first["groups"][0]["rows"] == (await proxy.claim())["groups"][0]["rows"]


async def test_a_group_with_too_few_rewards_is_complete_when_all_are_finished(proxy):
    members = await over_sampled(proxy, 2, 1)
    await proxy.finish(members[0], reward=1)
    await proxy.finish(members[1])
    before = await proxy.status("g")
    await proxy.finish(members[2], status="failed")

    assert [before, await proxy.status("g")] == ["open", "complete"]
    assert [reason for _, reason in await endings(proxy)] == [None] * 3


async def test_the_replacement_of_a_failed_rollout_is_surplus_too(proxy):
    """If it fails when enough of the others have a reward already."""
    members = await over_sampled(proxy, 1, 1, replace=True)
    await proxy.finish(members[0])
    await asyncio.gather(
        proxy.patch(f"/rollouts/{members[0]}", {"reward": 1}), proxy.finish(members[1], status="failed")
    )

    assert await proxy.status("g") == "complete"
    assert {None, "surplus"} >= {reason for _, reason in await endings(proxy)}


async def test_a_crash_after_the_last_finish_is_repaired_when_the_group_is_read(proxy, store):
    members = await over_sampled(proxy, 1, 2)
    await store.update_if(members[0], {"status": b'"completed"', "reward": b"1.0"}, expect={}, now_ms=1)

    assert await proxy.status("g") == "complete"
    assert await endings(proxy) == [("completed", None), *[("aborted", "surplus")] * 2]


async def test_a_call_of_a_surplus_rollout_is_cut_at_the_engine(store, http):
    """Another process has it in flight; its step is partial and late."""
    async with fake_engine() as engine:
        engine.hangs()
        async with proxying(engine.url, store) as one, proxying(engine.url, store) as other:
            proxy = Session(http, one.url)
            members = await over_sampled(proxy, 1, 1)
            url = f"{other.url}/rollouts/{members[1]}/v1/chat/completions"
            calling = asyncio.ensure_future(http.post(url, json={"messages": []}))
            await engine.reached.wait()
            await proxy.finish(members[0], reward=1)
            await asyncio.wait_for(engine.aborted.wait(), 50)
            (step,) = await wait_for_steps(store, members[1])
            await asyncio.wait([calling])

    assert (step.status, step.reason) == ("partial", "its group is complete without it")
    assert (await stored_rollout(store, members[1])).reason == "surplus"


@pytest.mark.parametrize(
    "fields", [{"over_sample": -1}, {"over_sample": 999}, {"over_sample": "2"}, {"replace": -1}, {"replace": 101}]
)
async def test_invalid_sizes_are_422(proxy, fields):
    """Nothing is opened."""
    response = await proxy.post("/groups", {"group_id": "g", "size": 2, **fields})

    assert response.status == 422
    assert (await proxy.get("/groups/g")).status == 404
