"""Claims of threads: their rows, their rewards and their advantages."""

import pytest
from tests.support.threaded import record_threads


async def group(proxy, *rewards):
    """Record a group of rollouts with several threads; `rewards` are of the rollout, its main thread and its sub-agent."""
    members = await proxy.open_group("g", len(rewards))
    for member, (reward, main, agent) in zip(members, rewards, strict=True):
        tree = await record_threads(proxy, member, finish=False)
        names = {thread["kind"]: thread["name"] for thread in tree["threads"]}
        of_threads = {"main": main, names["sub-agent"]: agent}
        given = {"thread_rewards": {name: value for name, value in of_threads.items() if value is not None}}
        assert (await proxy.patch(f"/rollouts/{member}", given)).status == 200
        await proxy.finish(member, reward=reward)
    return members


async def test_a_claim_of_the_main_thread_has_one_row_for_each_rollout(proxy):
    members = await group(proxy, (1.0, None, None), (0.0, None, None))
    refused = await proxy.claim(format="trl")
    claimed = await proxy.claim(format="trl", threads="main")
    (found,) = claimed["groups"]

    assert refused["reasons"]["refused"] == {"forked": 1}
    assert [(member, "main") for member in members] == [(row["rollout_id"], row["thread"]) for row in found["rows"]]
    assert {each["why"] for each in found["skipped"]} == {
        "threads=main: its thread is auxiliary",
        "threads=main: its thread is a sub-agent",
    }


async def test_advantages_of_threads_are_estimated_among_threads_of_the_same_kind(proxy):
    """Rows of other threads have the advantage of the rollout's reward."""
    await group(proxy, (1.0, 0.5, 3.0), (0.0, 0.1, 1.0))
    claimed = await proxy.claim(advantage="dr_grpo", threads="all", format="sequences")
    (found,) = claimed["groups"]
    advantages = {(row["rollout_id"], row["thread"].partition(":")[0]): row["advantage"] for row in found["rows"]}
    first, second = found["rollouts"]
    expected = {"main": (0.2, -0.2), "sub-agent": (1.0, -1.0), "auxiliary": (0.5, -0.5)}

    assert {
        (member, kind): pytest.approx(values[number])
        for kind, values in expected.items()
        for number, member in enumerate((first, second))
    } == advantages
    assert [row["advantage"] for row in found["rows"]] == [row["advantages"] for row in found["data"]]


async def test_advantages_of_turns_are_of_the_reward_of_their_thread(proxy):
    members = await group(proxy, (1.0, 0.5, None), (0.0, None, None))
    found = await proxy.get("/groups/g/export?advantage=step&discount=0.5&threads=agents&report=true")
    tree = (await proxy.get(f"/rollouts/{members[0]}/tree")).json
    turns = {row["thread"]: row["advantages"] for row in found.json["group"] if row["rollout_id"] == members[0]}
    main = [node["step_id"] for node in tree["nodes"] if node["thread"] == "main"]

    assert dict(zip(main, (0.25, 0.5), strict=True)) == {
        k: v for row in turns.values() for k, v in row.items() if k in main
    }
    assert [value for row in turns.values() for step, value in row.items() if step not in main] == [1.0]


async def test_the_penalty_lowers_the_reward_of_a_thread_by_its_own_length(proxy):
    await group(proxy, (1.0, 1.0, None), (1.0, None, None))
    found = await proxy.get(
        "/groups/g/export?overlong=penalize&max_len=1&overlong_buffer=1&threads=agents&report=true&members=all"
    )
    described = found.json["report"]["rows"]

    assert {row["reward"] for row in described} == {0.0}
    assert {row["raw_reward"] for row in described} == {1.0}


async def test_rewards_of_threads_are_frozen_by_a_claim(proxy):
    members = await group(proxy, (1.0, 0.5, None), (0.0, None, None))
    await proxy.claim()
    refused = await proxy.patch(f"/rollouts/{members[0]}", {"thread_rewards": {"main": 1.0}})
    same = await proxy.patch(f"/rollouts/{members[0]}", {"thread_rewards": {"main": 0.5}})

    assert (refused.status, same.status) == (409, 200)


async def test_groups_with_threads_of_different_rewards_are_mixed(proxy):
    await group(proxy, (1.0, 0.5, None), (1.0, 0.1, None))
    claimed = await proxy.claim(only_mixed=True, threads="agents")

    assert len(claimed["groups"]) == 1


async def test_rewards_of_threads_can_be_the_only_ones(proxy):
    await group(proxy, (None, 0.5, None), (None, 0.1, None))
    claimed = await proxy.claim(
        format="verl_dataproto", threads="main", advantage="grpo", prompt_length=512, response_length=512
    )

    assert [row["reward"] for row in claimed["groups"][0]["rows"]] == [0.5, 0.1]


async def test_other_threads_of_claims_are_refused(proxy):
    for threads in ("some", 1, ["main"]):
        refused = await proxy.post("/batches/claim", {"consumer": "c", "threads": threads})
        assert refused.status == 422
        assert "threads" in refused.json["error"]["message"]
