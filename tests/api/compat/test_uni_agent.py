"""The routes of a session in Uni-Agent's gateway for verl."""

import asyncio

import pytest

RUN = {"reward": 0.5, "acc": True, "finished": True}


async def posted(proxy, rollout, route, info):
    return await proxy.post(f"/sessions/{rollout}/{route}", {"reward_info": info})


async def test_a_task_posts_the_reward_of_the_session_that_its_agent_called(proxy):
    """The agent calls the session's base URL; the metadata has the whole `reward_info`."""
    await proxy.post("/rollouts", {"rollout_id": "s1", "metadata": {"task": 7}})
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    called = await proxy.post("/sessions/s1/v1/chat/completions", body)
    set_reward = await posted(proxy, "s1", "reward_info", RUN)
    completed = [await proxy.post("/sessions/s1/complete", {}) for _ in range(2)]
    found = (await proxy.get("/rollouts/s1")).json

    assert [answer.status for answer in (called, set_reward, *completed)] == [200] * 4
    assert set_reward.json == completed[0].json == {"status": "ok"}
    assert tuple(found[key] for key in ("status", "reward", "metadata")) == (
        "completed",
        0.5,
        {"task": 7, "reward_info": RUN},
    )
    assert found["counts"]["steps"] == 1


@pytest.mark.parametrize(
    ("info", "reward"),
    [
        ({"reward_score": 2}, 2.0),
        ({"score": -1.5, "reward": None}, -1.5),
        ({"reward": True}, None),
        ({"label": "a"}, None),
    ],
)
async def test_the_reward_is_the_first_number_of_reward_reward_score_and_score(proxy, info, reward):
    await proxy.post("/rollouts", {"rollout_id": "s1"})
    status = (await posted(proxy, "s1", "complete", info)).status
    found = (await proxy.get("/rollouts/s1")).json

    assert (status, found["reward"], found["metadata"]) == (200, reward, {"reward_info": info})


@pytest.mark.parametrize("route", ["reward_info", "complete"])
async def test_wrong_bodies_and_unknown_sessions_are_refused(proxy, route):
    await proxy.post("/rollouts", {"rollout_id": "s1"})
    statuses = [(await posted(proxy, "s1", route, info)).status for info in (7, [], "x")]

    assert (statuses, (await posted(proxy, "unknown", route, RUN)).status) == ([422] * 3, 404)
    assert (await proxy.get("/rollouts/s1")).json["status"] == "open"


@pytest.mark.parametrize("route", ["reward_info", "complete"])
async def test_a_reward_beyond_float32_is_refused(proxy, route):
    """As in all rewards; nothing changes."""
    await proxy.post("/rollouts", {"rollout_id": "s1"})
    refused = await posted(proxy, "s1", route, {"score": 1e300})
    found = (await proxy.get("/rollouts/s1")).json

    assert (refused.status, refused.json["error"]["param"]) == (422, "reward_info.score")
    assert tuple(found[key] for key in ("status", "reward", "metadata")) == ("open", None, {})


@pytest.mark.parametrize("route", ["reward_info", "complete"])
@pytest.mark.parametrize("before", [None, {}, {"task": 7}])
async def test_metadata_that_changes_meanwhile_is_kept(proxy, store, route, before):
    """`reward_info` is added to the metadata as it is in the store."""
    await proxy.post("/rollouts", {"rollout_id": "s1", **({} if before is None else {"metadata": before})})
    reached, proceed = store.pauses("update_if")
    slow = asyncio.ensure_future(posted(proxy, "s1", route, RUN))
    await reached.wait()
    del store.waiting["update_if"]
    quick = await proxy.patch("/rollouts/s1", {"metadata": {"other": 1}})
    proceed.set()
    found = [(await slow).status, quick.status, (await proxy.get("/rollouts/s1")).json]

    assert found[:2] == [200, 200]
    assert (found[2]["metadata"], found[2]["reward"]) == ({"other": 1, "reward_info": RUN}, 0.5)


async def test_a_reward_cannot_change_once_the_group_is_claimed(proxy):
    group = (await proxy.post("/groups", {"group_id": "g", "size": 2})).json
    for rollout in group["rollouts"]:
        await proxy.chat(rollout["rollout_id"])
        await posted(proxy, rollout["rollout_id"], "complete", RUN)
    claimed = await proxy.claim()
    changed = await posted(proxy, group["rollouts"][0]["rollout_id"], "reward_info", {"reward": 9})

    assert ([entry["group_id"] for entry in claimed["groups"]], changed.status) == (["g"], 409)
