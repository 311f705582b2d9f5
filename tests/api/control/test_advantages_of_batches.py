"""Advantages, returns and penalties over HTTP: in claims, with the baseline of a whole batch, and in exports."""

from statistics import fmean, pstdev

import pytest
from tests.support.session import names_in

from proxy.api.control import claims


def by_group(batch):
    return {group["group_id"]: group["advantages"] for group in batch["groups"]}


def normalized(*rewards):
    return [pytest.approx((reward - fmean(rewards)) / pstdev(rewards)) for reward in rewards]


async def test_reinforce_pp_is_normalized_over_all_rewarded_rollouts_of_the_batch(proxy):
    """A rollout without a reward has no advantage; one without rows counts."""
    await proxy.group("g1", 1, 0)
    await proxy.group("g2", 5, None)
    silent, member = await proxy.open_group("g3", 2)
    await proxy.chat(member)
    await proxy.finish(silent, reward=-2)
    await proxy.finish(member, reward=0.5)
    batch = await proxy.claim(groups=10, advantage="reinforce_pp", min_group=1, reward_s=0)
    one, zero, five, _, half = normalized(1, 0, 5, -2, 0.5)

    assert by_group(batch) == {"g1": [one, zero], "g2": [five], "g3": [half]}
    assert [row["advantages"] for row in batch["groups"][0]["data"]] == [one, zero]
    assert [row["advantage"] for row in batch["groups"][0]["rows"]] == [one, zero]


async def test_reinforce_pp_with_a_discount_is_normalized_over_the_turns_of_the_batch(proxy):
    """Two rollouts with two turns each have the returns 0.5 and 1, and -1 and -2."""
    _, (first,) = await conversation(proxy, 1, group="g1")
    _, (second,) = await conversation(proxy, -2, group="g2")
    batch = await proxy.claim(groups=10, advantage="reinforce_pp", discount=0.5)
    half, one, minus_one, minus_two = normalized(0.5, 1, -1, -2)

    assert {"g1": [{first[0]: half, first[1]: one}], "g2": [{second[0]: minus_one, second[1]: minus_two}]} == by_group(
        batch
    )


async def test_a_group_that_the_format_refuses_is_not_in_the_baseline(proxy):
    await proxy.group("g1", 1, 0)
    await proxy.group("g2", 5, None)
    batch = await proxy.claim(groups=10, advantage="reinforce_pp", format="scored_data", members="all")

    assert {"g1": normalized(1, 0)} == by_group(batch)
    assert names_in(batch, "refused") == ["g2"]


async def test_a_group_that_is_deleted_while_it_is_claimed_is_not_in_the_baseline(proxy, monkeypatch):
    await proxy.group("g1", 1, 0)
    await proxy.group("g2", 5, 3)

    async def normalize(context, claim):
        await proxy.delete("/groups/g2")
        await original(context, claim)

    original = claims.normalize
    monkeypatch.setattr(claims, "normalize", normalize)
    batch = await proxy.claim(groups=10, advantage="reinforce_pp")

    assert {"g1": normalized(1, 0)} == by_group(batch)
    assert (await proxy.ack(batch)).status == 200


async def test_a_group_that_lost_its_lease_is_not_in_the_baseline(proxy, store, monkeypatch):
    await proxy.group("g1", 1, 0)
    await proxy.group("g2", 5, 3)
    extend = store.queue.extend

    async def lose(groups, *arguments, **options):
        has = await extend(groups, *arguments, **options)
        return [found and waiting.group != "g2" for waiting, found in zip(groups, has, strict=True)]

    monkeypatch.setattr(store.queue, "extend", lose)
    batch = await proxy.claim(groups=10, advantage="reinforce_pp")

    assert {"g1": normalized(1, 0)} == by_group(batch)


async def test_the_rewards_of_a_normalized_batch_are_frozen_until_it_is_undone(proxy, store, monkeypatch):
    """Rewards that a failed claim froze can be changed again."""
    member, _ = await proxy.group("g1", 1, 0)

    async def fail(*_, **__):
        raise RuntimeError

    with monkeypatch.context() as failing:
        failing.setattr(claims, "normalize", fail)
        failed = await proxy.post("/batches/claim", {"consumer": "t", "advantage": "reinforce_pp"})
    changed = await proxy.patch(f"/rollouts/{member}", {"reward": 2})
    batch = await proxy.claim(advantage="reinforce_pp")

    assert (failed.status, changed.status, await proxy.status("g1")) == (500, 200, "claimed")
    assert (await proxy.patch(f"/rollouts/{member}", {"reward": 3})).status == 409
    assert {"g1": normalized(2, 0)} == by_group(batch)


async def conversation(proxy, *rewards, group="g", turns=2):
    """Record a group of conversations, one for each of these rewards of the last turn; return members and steps."""
    members = await proxy.open_group(group, len(rewards))
    steps = []
    for member, reward in zip(members, rewards, strict=True):
        steps.append(await proxy.turns(member, turns))
        await proxy.finish(member, reward=reward)
    return members, steps


def sampled(row):
    return [value for value, mask in zip(row["advantages"], row["mask"], strict=True) if mask]


async def test_a_discount_gives_each_turn_its_own_advantage_in_the_tokens_of_a_format(proxy):
    """The returns are 0.5 and 1 for the first rollout, 0 and 0 for the second: their mean is 0.375."""
    members, steps = await conversation(proxy, 1, 0)
    batch = await proxy.claim(advantage="dr_grpo", discount=0.5, format="scored_data")
    (group,) = batch["groups"]
    expected = [{steps[0][0]: 0.125, steps[0][1]: 0.625}, dict.fromkeys(steps[1], -0.375)]
    rows = zip(group["data"]["advantages"], group["data"]["masks"], strict=True)
    trained = [{value for value, token in zip(*row, strict=True) if token != -100} for row in rows]

    assert (group["rollouts"], group["advantages"]) == (members, expected)
    assert trained == [{0.125, 0.625}, {-0.375}]
    assert [None] * len(group["rows"]) == [row["advantage"] for row in group["rows"]]


async def test_a_claim_and_an_export_have_the_same_advantages_of_turns(proxy):
    members, (steps, _) = await conversation(proxy, 1, 0)
    await proxy.patch(f"/rollouts/{members[0]}", {"step_rewards": {steps[0]: 0.5}})
    exports = [
        (await proxy.get(f"{path}/export?advantage=step&discount=0.5")).json
        for path in ("/groups/g", f"/rollouts/{members[0]}")
    ]
    many = (await proxy.get("/export?advantage=step&discount=0.5&container=json")).json
    (group,) = (await proxy.claim(advantage="step", discount=0.5))["groups"]
    expected = {steps[0]: 1.0, steps[1]: 1.0}

    assert exports[0] == group["data"]
    assert [
        exports[0][0]["advantages"],
        exports[1]["rows"][0]["advantages"],
        next(row for row in many["rows"] if row["rollout_id"] == members[0])["advantages"],
    ] == [expected, *[expected] * 2]


async def test_the_penalty_lowers_the_reward_of_rows_and_their_report_has_the_reward_before(proxy):
    """Also in claims and in exports of many rollouts; the stored reward does not change."""
    (member,) = await proxy.group("g", 1)
    (row,) = (await proxy.get(f"/rollouts/{member}/export")).json["rows"]
    length = len(row["token_ids"]) - row["prompt_len"]
    penalty = f"overlong=penalize&max_len={length + 2}&overlong_buffer=4&report=true"
    alone, group, many = [
        (await proxy.get(f"{path}/export?{penalty}&container=json")).json
        for path in (f"/rollouts/{member}", "/groups/g", "")
    ]
    (claimed,) = (await proxy.claim(advantage="dr_grpo", overlong="penalize", max_len=length + 2, overlong_buffer=4))[
        "groups"
    ]
    described = {"rollout_id": member, "step_ids": [row["spans"][0]["step_id"]], "reward": 0.5, "raw_reward": 1.0,
                 "weight": 1.0}  # fmt: skip

    assert [rows[0]["reward"] for rows in (alone["rows"], group["group"], many["rows"], claimed["data"])] == [0.5] * 4
    for rows in (alone["report"]["rows"], group["report"]["rows"], many["report"]["rows"]):
        assert rows == [{**described, "advantage": None}]
    assert (claimed["rows"], claimed["rewards"]) == ([{**described, "advantage": 0.0}], [0.5])
    assert row["token_ids"] == alone["rows"][0]["token_ids"]
    assert (await proxy.get(f"/rollouts/{member}")).json["reward"] == 1.0


async def test_only_mixed_compares_rewards_before_the_penalty(proxy):
    """Otherwise groups in which only the lengths differ would be kept."""
    members = await proxy.group("g", None, None, finish=False)
    await proxy.turns(members[1], 2)
    for member in members:
        await proxy.finish(member, reward=1)
    query = "branches=longest&overlong=penalize&max_len=2000&overlong_buffer=2000"
    rewards = [row["reward"] for row in (await proxy.get(f"/groups/g/export?{query}")).json]

    assert len(set(rewards)) == 2
    assert (await proxy.get(f"/groups/g/export?{query}&only_mixed=true")).json == []


async def test_rows_that_share_a_reward_share_the_reward_before_the_penalty(proxy):
    opened = (await proxy.post("/rollouts", {})).json["rollout_id"]
    for question in ("one", "two"):
        await proxy.chat(opened, {"role": "user", "content": question})
    await proxy.finish(opened, reward=1)
    query = "row_weight=split&overlong=penalize&max_len=1&overlong_buffer=1&report=true"
    report = (await proxy.get(f"/rollouts/{opened}/export?{query}")).json["report"]

    assert [(row["reward"], row["raw_reward"], row["weight"]) for row in report["rows"]] == [(0.0, 0.5, 0.5)] * 2


async def test_rewards_too_large_for_a_baseline_refuse_the_group_and_can_be_changed(proxy):
    *_, member = await proxy.group("g", 3.4e38, 3.4e38, -3.4e38)
    batch = await proxy.claim(advantage="dr_grpo")
    exported = await proxy.get("/groups/g/export?advantage=rloo")

    assert (exported.status, exported.json["error"]["param"]) == (409, "advantage")
    assert (batch["groups"], names_in(batch, "refused")) == ([], ["g"])
    assert (await proxy.patch(f"/rollouts/{member}", {"reward": 3.4e38})).status == 200
    assert by_group(await proxy.claim(advantage="dr_grpo")) == {"g": [0.0, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"advantage": "step", "format": "trl"}, "advantage"),
        ({"advantage": "grpo", "discount": 0.9, "format": "skyrl"}, "discount"),
        ({"discount": 0.9}, "discount"),
        ({"overlong": "penalize", "max_len": 9}, "overlong_buffer"),
        ({"overlong": "penalize", "max_len": 9, "overlong_buffer": 10}, "overlong_buffer"),
        ({"overlong_buffer": 10}, "overlong_buffer"),
    ],
)
async def test_a_claim_with_options_that_exclude_each_other_claims_nothing(proxy, options, param):
    await proxy.group("g", 1, 0)
    response = await proxy.post("/batches/claim", {"consumer": "t", **options})

    assert (response.status, response.json["error"]["param"], await proxy.status("g")) == (400, param, "complete")
