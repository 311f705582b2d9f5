"""`advantage=vine`: the advantages of a rollout's steps, of the values of its states."""

import pytest
from tests.support.branched import STEPS, Call, branch, mark, record

from proxy.rollouts.rollout import write_fields
from proxy.trajectory.step import Sampled

VINE = "advantage=vine&container=json"


async def sources(store, *rewards, values=(), **fields):
    """Record the group g of a source for each reward; the first one has branches with these rewards before these steps."""
    names = [f"r{number}" for number in range(len(rewards))]
    found = [
        await record(store, name, *STEPS, group_id="g", reward=reward, status="completed", **fields)
        for name, reward in zip(names, rewards, strict=True)
    ]
    await store.groups.open("g", write_fields({"size": len(names), "members": names}), now_ms=1)
    branches = [(before, reward) for before, earned in values for reward in earned]
    for number, (before, reward) in enumerate(branches):
        await branch(store, found[0], before, f"b{number}", "x", reward=reward)
    await mark(store, found[0], rollouts=[f"b{number}" for number in range(len(branches))])
    return found


async def advantages(proxy, path="/rollouts/r0/export"):
    """Return the advantage of each step, by rollout."""
    response = await proxy.get(f"{path}?{VINE}")
    assert response.status == 200, response.text
    rows = response.json if path.startswith("/groups") else response.json["rows"]
    return {row["rollout_id"]: row["advantages"] for row in rows}


async def test_the_tokens_up_to_the_next_valued_step_get_the_difference_of_the_values(proxy, store):
    """V(s1) = 1/2, V(s3) = 1/4, the mean of the other rollouts is 1/8 and the reward is 1."""
    await sources(store, 1.0, 0.0, 0.25, values=[("s1", (1, 0)), ("s3", (1, 0, 0, 0))])
    expected = {"s0": 1 / 2 - 1 / 8, "s1": 1 / 4 - 1 / 2, "s2": 1 / 4 - 1 / 2, "s3": 1 - 1 / 4}

    assert await advantages(proxy) == {"r0": expected}


async def test_the_value_of_the_beginning_is_the_baseline_of_the_first_tokens(proxy, store):
    """V(beginning) = 3/4 and V(s2) = 1/2; the other rollouts do not matter."""
    await sources(store, 0.0, 1.0, values=[(None, (1, 0.5)), ("s2", (0.5,))])

    assert (await advantages(proxy))["r0"] == {"s0": -1 / 4, "s1": -1 / 4, "s2": -1 / 2, "s3": -1 / 2}


async def test_a_rollout_without_values_has_its_reward_minus_the_mean_of_the_others(proxy, store):
    """As with rloo. The rewards of the others are 0 and 1/2; those without one do not count."""
    await sources(store, 1.0, 0.0, None, 0.5, values=[("s1", (0.5,))])
    found = await advantages(proxy, "/groups/g/export")

    assert list(found) == ["r0", "r1", "r3"]
    assert dict.fromkeys(STEPS, 0.5 - (1 + 0) / 2) == found["r3"]
    assert found["r0"] == {"s0": 0.5 - 0.25, "s1": 0.5, "s2": 0.5, "s3": 0.5}


async def test_a_rollout_that_inherited_all_of_its_steps_is_not_in_the_baseline(proxy, store):
    """The policy sampled nothing of it: the other rollout of r0 is r1, and that of r1 is r0."""
    for name, reward, of in (("r0", 1.0, None), ("r1", 0.25, None), ("r2", 9.0, "r0")):
        calls = [Call(step, sampled=None if of is None else Sampled(of, step)) for step in STEPS]
        await record(store, name, *calls, group_id="g", reward=reward, status="completed")
    await store.groups.open("g", write_fields({"size": 3, "members": ["r0", "r1", "r2"]}), now_ms=1)
    found = await advantages(proxy, "/groups/g/export")

    assert {"r0": dict.fromkeys(STEPS, 0.75), "r1": dict.fromkeys(STEPS, -0.75)} == found
    assert found["r0"] == (await advantages(proxy))["r0"]


async def test_alone_and_in_its_group_and_in_a_batch_a_rollout_has_the_same_advantages(proxy, store):
    await sources(store, 1.0, 0.0, values=[("s2", (1, 0, 0.25))])
    await proxy.get("/groups/g")  # completes it
    alone = {**await advantages(proxy), **await advantages(proxy, "/rollouts/r1/export")}
    (claimed,) = (await proxy.claim(advantage="vine"))["groups"]

    assert alone == await advantages(proxy, "/groups/g/export")
    assert [alone["r0"], alone["r1"]] == claimed["advantages"]
    assert alone == {row["rollout_id"]: row["advantages"] for row in claimed["data"]}


async def test_branches_of_the_beginning_need_no_group(proxy, store):
    source = await record(store, "r0", *STEPS, reward=1.0)
    await branch(store, source, None, "b", "x", reward=0.25)
    await mark(store, source, rollouts=["b"])

    assert {"r0": dict.fromkeys(STEPS, 0.75)} == await advantages(proxy)


@pytest.mark.parametrize("group", [True, False])
async def test_without_a_value_of_the_beginning_and_other_rewards_it_is_409(proxy, store, group):
    """In an export of many rollouts, such a one is skipped. A claim refuses its group."""
    if group:
        await sources(store, 1.0, None, values=[("s1", (0.5,))])
        await proxy.get("/groups/g")
    else:
        await record(store, "r0", *STEPS, reward=1.0)
    refused = await proxy.get(f"/rollouts/r0/export?{VINE}")
    many = (await proxy.get(f"/export?{VINE}&report=true")).json

    assert (refused.status, refused.json["error"]["param"]) == (409, "advantage")
    assert "'r0' has no branches at its beginning" in refused.json["error"]["message"]
    assert [refused.json["error"]["message"]] == [
        it["why"] for it in many["report"]["skipped"] if it["rollout_id"] == "r0"
    ]
    if group:
        assert (await proxy.claim(advantage="vine", reward_s=0))["refused"][0]["code"] == "no_value"


async def test_branches_of_another_version_are_409_unless_any_counts(proxy, store):
    """A claim refuses the group with the code `other_version`."""
    (source, _) = await sources(store, 1.0, 0.0, values=[("s1", (0.5,))])
    await branch(store, source, "s1", "later", Call("x", "2"), reward=0.0)
    await mark(store, source, rollouts=["later"])
    await proxy.get("/groups/g")
    refused = await proxy.get(f"/rollouts/r0/export?{VINE}")
    counted = await proxy.get(f"/rollouts/r0/export?{VINE}&any_version=true")
    claim = await proxy.claim(advantage="vine")

    assert (refused.status, refused.json["error"]["param"]) == (409, "any_version")
    assert counted.json["rows"][0]["advantages"] == {"s0": 0.25, "s1": 0.75, "s2": 0.75, "s3": 0.75}
    assert claim["refused"][0]["code"] == "other_version"
    assert [group["group_id"] for group in (await proxy.claim(advantage="vine", any_version=True))["groups"]] == ["g"]


async def test_a_rollout_with_rewards_of_threads_is_409(proxy, store):
    """The rewards of branches are of whole rollouts."""
    await sources(store, 1.0, 0.0, thread_rewards={"main": 1.0})
    refused = await proxy.get(f"/rollouts/r0/export?{VINE}")

    assert (refused.status, "thread_rewards" in refused.json["error"]["message"]) == (409, True)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("advantage=vine&discount=0.5", "discount"),
        ("advantage=vine&overlong=penalize&max_len=9&overlong_buffer=4", "overlong"),
        ("advantage=step&any_version=true", "any_version"),
        ("advantage=vine&format=trl", "advantage"),
    ],
)
async def test_options_that_vine_excludes_are_400(proxy, query, param):
    refused = await proxy.get(f"/export?{query}")

    assert (refused.status, refused.json["error"]["param"]) == (400, param)


async def test_a_rollout_without_a_reward_has_no_advantages(proxy, store):
    await record(store, "r0", *STEPS)

    assert await advantages(proxy) == {"r0": None}
