"""Claims of groups with playbacks: versions, staleness, rewards and rows are those of live tokens."""

from dataclasses import replace

import pytest
from tests.support.playbacks import at, branched, record
from tests.support.session import names_in


async def played(proxy, store, name, *members, rewards=(1, 2, 3), **group):
    """Record a group of playbacks: a member is the versions (or version and epoch) of its two inherited and its live steps."""
    names = await proxy.open_group(name, len(members) - group.get("over_sample", 0), **group)
    for rollout, versions in zip(names, members, strict=True):
        for step, version in zip(branched(), versions, strict=False):
            of = version if isinstance(version, tuple) else (version,)
            await record(store, at(replace(step, rollout_id=rollout), *of))
    for rollout, reward in zip(names, rewards, strict=False):
        await proxy.finish(rollout, reward=reward)
    return names


async def test_the_version_and_staleness_of_a_group_are_those_of_its_live_tokens(proxy, store):
    """The inherited ones are of the versions 1 and 2, the oldest live one is of version 7, and 9 is announced."""
    await proxy.put("/policy", {"version": 9})
    await played(proxy, store, "g", ("1", "2", "7"), ("1", "2", "8"))
    first = await proxy.claim(max_staleness=2)
    await proxy.release(first)
    training = (await proxy.get("/training")).json["groups"]
    last = await proxy.claim(max_staleness=1)

    assert [(group["policy_version"], group["staleness"]) for group in first["groups"]] == [("7", 2)]
    assert [(group["version"], group["staleness"]) for group in training] == [("7", 2)]
    assert [it["why"] for it in last["dropped"]] == ["its oldest token is 2 policy versions behind; max_staleness is 1"]
    assert (await proxy.post("/groups/g/requeue", {"max_staleness": 2})).status == 200
    assert [
        (group["policy_version"], group["staleness"]) for group in (await proxy.claim(max_staleness=1))["groups"]
    ] == [("7", 2)]


async def test_groups_are_ordered_by_the_oldest_version_of_their_live_tokens(proxy, store):
    await played(proxy, store, "eight", ("1", "1", "8"))
    await played(proxy, store, "seven", ("9", "9", "7"))

    assert names_in(await proxy.claim(groups=2, min_group=1)) == ["seven", "eight"]


@pytest.mark.parametrize("inherited", [None, "main"])
async def test_a_group_is_not_of_unknown_age_because_of_what_it_inherited(proxy, store, inherited):
    await proxy.put("/policy", {"version": 9})
    await played(proxy, store, "g", (inherited, inherited, "9"))

    assert names_in(await proxy.claim(max_staleness=0, min_group=1)) == ["g"]


async def test_a_group_is_not_of_an_earlier_epoch_because_of_what_it_inherited(proxy, store):
    await proxy.put("/policy", {"version": 9})
    await proxy.put("/policy", {"version": 1, "new_epoch": True})
    await played(proxy, store, "g", ("9", "9", ("1", 1)))
    (group,) = (await proxy.claim(max_staleness=0, min_group=1))["groups"]

    assert (group["policy_version"], group["policy_epoch"], group["staleness"]) == ("1", 1, 0)


async def test_each_row_has_the_point_where_it_leaves_what_its_rollout_inherited(proxy, store):
    """Also in the report of exports; `inherited=masked` shortens its prompt."""
    (name,) = await played(proxy, store, "g", ("1", "2", "7"))
    point = {"of": "r0", "step_id": "b", "tokens": 4}
    skipped = [{"rollout_id": name, "step_id": step_id, "why": "inherited"} for step_id in "ab"]
    (group,) = (await proxy.claim(format="trl", min_group=1, advantage="none"))["groups"]
    report = (await proxy.get(f"/rollouts/{name}/export?report=true&inherited=masked")).json["report"]
    trained = await proxy.get("/groups/g/export?format=slime&inherited=trained&report=true")
    masked = (await proxy.get(f"/rollouts/{name}/export?format=trl&inherited=masked")).json["rows"]
    exported = await proxy.get(f"/rollouts/{name}/export")

    assert [{"rollout_id": name, "step_ids": ["c"], "reward": 1, "advantage": None, "weight": 1, "branch": point}] == (
        group["rows"]
    )
    assert (
        group["skipped"], group["data"]["prompt_ids"], group["data"]["completion_ids"]
    ) == (skipped, [[1, 10, 9, 2, 11, 9, 3]], [[12, 9]])  # fmt: skip
    assert (report["rows"][0]["branch"], report["rows"][0]["step_ids"]) == (point, ["c"])
    assert (masked[0]["prompt_ids"], masked[0]["env_mask"]) == ([[1]], [[0, 0, 0, 0, 0, 0, 1, 1]])
    assert trained.json["report"]["rows"][0]["step_ids"] == ["a", "b", "c"]
    assert exported.headers["X-Export-Skipped"] == "2; inherited (2)"


async def test_a_member_that_inherited_all_of_its_steps_has_no_rows_and_is_not_compared(proxy, store):
    """Neither by an estimator nor with only_mixed; it has no version, and members=all refuses the group."""
    await proxy.put("/policy", {"version": 9})
    live, other, inherited = await played(proxy, store, "g", ("1", "2", "9"), ("1", "2", "9"), ("1", "2"))
    whole = await proxy.claim(members="all", max_staleness=0)
    claimed = await proxy.claim(advantage="dr_grpo", max_staleness=0)
    (group,) = claimed["groups"]
    await proxy.release(claimed)

    assert [it["code"] for it in whole["refused"]] == ["no_rows"]
    assert (group["rollouts"], group["rewards"], group["advantages"]) == ([live, other], [1.0, 2.0], [-0.5, 0.5])
    assert {"rollout_id": inherited, "why": "none of its steps has a row"} in group["skipped"]


async def test_only_mixed_compares_the_rewards_of_members_with_live_tokens(proxy, store):
    await played(proxy, store, "equal", ("1", "2", "9"), ("1", "2", "9"), ("1", "2"), rewards=(1, 1, 5))
    await played(proxy, store, "mixed", ("1", "2", "9"), ("1", "2", "9"), ("1", "2"), rewards=(0, 1, 1))
    trained = await proxy.get("/groups/equal/export?only_mixed=true&inherited=trained&report=true")
    claimed = await proxy.claim(groups=2, only_mixed=True)

    assert names_in(claimed) == ["mixed"]
    assert [(it["group_id"], it["code"]) for it in claimed["dropped"]] == [("equal", "equal_rewards")]
    assert len(trained.json["report"]["rows"]) == 3


async def test_a_group_without_a_live_token_is_dropped_as_it_has_nothing_to_train(proxy, store):
    """It is not stale: it has no tokens."""
    await proxy.put("/policy", {"version": 9})
    await played(proxy, store, "g", ("1", "2"), ("1", "2"))

    assert [it["code"] for it in (await proxy.claim(max_staleness=0))["dropped"]] == ["too_few_members"]


async def test_an_over_sampled_group_needs_its_size_of_rewarded_members_with_live_tokens(proxy, store):
    """A member that is answered from its tape to the end is finished first."""
    members = await played(
        proxy, store, "g", ("1", "2"), ("1", "2", "9"), ("1", "2", "9"), ("1", "2", "9"), over_sample=2, rewards=[]
    )
    for member in members[:2]:
        await proxy.finish(member, reward=1)
    before = await proxy.status("g")
    await proxy.finish(members[2], reward=0)
    claimed = await proxy.claim()

    assert before == "open"
    assert members[1:3] == claimed["groups"][0]["rollouts"]


async def test_metrics_of_a_claim_are_those_of_live_tokens(proxy, store):
    """The window of versions, the staleness, the rewards and the numbers of tokens."""
    await proxy.put("/policy", {"version": 29})
    await played(proxy, store, "g", ("1", "2", "27"), ("1", "2"))
    await proxy.claim(min_group=1)
    lines = (await proxy.get("/metrics")).text.decode().splitlines()
    counted = {name: value for name, _, value in (line.rpartition(" ") for line in lines) if float_or_none(value)}

    assert counted['tokentape_reward_count{policy="default",versions="20-29"}'] == "1.0"
    assert tuple(counted[f'tokentape_rollout_tokens_{kind}{{policy="default"}}'] for kind in ("count", "sum")) == (
        "1.0",
        "2.0",
    )
    assert counted['tokentape_claim_staleness_sum{policy="default"}'] == "2.0"
    assert {
        name.removeprefix("tokentape_reward_count") for name in counted if name.startswith("tokentape_reward_count")
    } == {'{policy="default",versions="20-29"}'}


async def conversation(proxy, rollout, seed):
    """Make a conversation of three turns; return the IDs of its steps."""
    messages, steps = [], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        reply = await proxy.chat(rollout, *messages, seed=seed)
        messages.append({"role": "assistant", "content": reply.message["content"]})
        steps.append(reply.step_id)
    return steps


async def test_a_group_of_branches_trains_what_follows_the_branch_step(proxy):
    """Version 3 sampled the source, version 5 the branches: they are fresh. With the source, each step is trained once."""
    await proxy.put("/policy", {"version": 3})
    source = await conversation(proxy, "r0", 1)
    await proxy.finish("r0", reward=0.5)
    await proxy.put("/policy", {"version": 5})
    members = await proxy.open_group("g", 2, rollout={"playback": {"of": "r0", "before": source[1]}})
    steps = {name: await conversation(proxy, name, seed) for seed, name in enumerate(members, 2)}
    for reward, name in enumerate(members):
        await proxy.finish(name, reward=reward)
    first, second, _ = (await proxy.get("/rollouts/r0/steps")).json["steps"]
    (group,) = (await proxy.claim(advantage="grpo", max_staleness=0))["groups"]
    exported = (await proxy.get("/export?format=sequences&container=json&report=true")).json
    point = {"of": "r0", "step_id": source[0], "tokens": len(first["choices"][0]["ids"])}

    assert [[source[0]]] * 2 == [found[:1] for found in steps.values()]
    assert (group["advantages"], group["policy_version"], group["staleness"]) == ([-1.0, 1.0], "5", 0)
    assert [(steps[name][1:], point) for name in members] == [(row["step_ids"], row["branch"]) for row in group["rows"]]
    assert [second["prompt_ids"]] * 2 == [row["token_ids"][: row["prompt_len"]] for row in group["data"]]
    assert {*source, *steps[members[0]][1:], *steps[members[1]][1:]} == {
        step_id for row in exported["report"]["rows"] for step_id in row["step_ids"]
    }
    assert sum(len(row["step_ids"]) for row in exported["report"]["rows"]) == 7


async def failed(proxy, member):
    """Finish a rollout as failed; return the one in its place."""
    return (await proxy.finish(member, status="failed")).json["replaced_by"]["rollout_id"]


async def test_a_rollout_in_place_of_a_failed_one_trains_what_it_repeats_of_it(proxy):
    """The failed one has no rows. Without its group, the rollout trains only what it sampled."""
    await proxy.put("/policy", {"version": 3})
    first, other = await proxy.open_group("g", 2, replace={"playback": True})
    begun = await proxy.turns(first, 2)
    await proxy.put("/policy", {"version": 5})
    second = await failed(proxy, first)
    steps = await proxy.turns(second, 3)
    await proxy.finish(second, reward=1)
    rest = await proxy.turns(other, 1)
    await proxy.finish(other, reward=0)
    claimed = await proxy.claim(format="trl", advantage="dr_grpo")
    alone = (await proxy.get(f"/rollouts/{second}/export?report=true")).json["report"]
    exported = (await proxy.get("/groups/g/export?report=true&format=steps")).json["report"]["rows"]
    (group,) = claimed["groups"]

    assert begun == steps[:2]
    assert {row["rollout_id"]: row["step_ids"] for row in group["rows"]} == {other: rest, second: steps}
    assert (group["policy_version"], {*group["advantages"]}) == ("3", {0.5, -0.5})
    assert not [row for row in group["rows"] if "branch" in row]
    assert {step_id for row in exported for step_id in row["step_ids"]} == {*steps, *rest}
    assert ([steps[2:]], steps[1]) == (
        [row["step_ids"] for row in alone["rows"]],
        alone["rows"][0]["branch"]["step_id"],
    )


async def test_a_rollout_that_only_repeats_what_it_replaces_is_a_sample_of_the_policy(proxy):
    """The agent of the failed one died after its last call."""
    first, other = await proxy.open_group("g", 2, replace={"playback": True})
    steps = await proxy.turns(first, 2)
    second = await failed(proxy, first)
    again = await proxy.turns(second, 2)
    await proxy.finish(second, reward=1)
    await proxy.turns(other, 1)
    await proxy.finish(other, reward=0)
    (group,) = (await proxy.claim(advantage="dr_grpo", only_mixed=True))["groups"]

    assert steps == again == next(row["step_ids"] for row in group["rows"] if row["rollout_id"] == second)
    assert dict(zip(group["rollouts"], group["advantages"], strict=True)) == {second: 0.5, other: -0.5}


async def test_a_replaced_branch_trains_what_followed_the_branch_step(proxy):
    """The source trains what all branches inherited."""
    source = await proxy.turns("r0", 2)
    await proxy.finish("r0", reward=0)
    body = {"before": source[1], "count": 1, "replace": {"playback": True}}
    (first,) = [it["rollout_id"] for it in (await proxy.post("/rollouts/r0/branches", body)).json["rollouts"]]
    begun = await proxy.turns(first, 2)
    second = await failed(proxy, first)
    steps = await proxy.turns(second, 3)
    await proxy.finish(second, reward=1)
    (group,) = (await proxy.claim(min_group=1))["groups"]

    assert ([source[0], begun[1]], source[0]) == (steps[:2], group["rows"][0]["branch"]["step_id"])
    assert [steps[1:]] == [row["step_ids"] for row in group["rows"]]


def float_or_none(value):
    try:
        return float(value)
    except ValueError:
        return None
