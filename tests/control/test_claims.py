"""Which groups a claim gets, and what becomes of the others."""

import asyncio

import pytest


async def names(proxy, **said):
    return [group["group_id"] for group in (await proxy.claim(groups=10, **said))["groups"]]


async def test_a_claim_gets_complete_groups_rendered(proxy):
    """Each as the trainer takes it, with what its consumer needs to know."""
    members = await proxy.group("g", 1, 0)
    await proxy.group("open", 1, finish=False)
    exported = (await proxy.get("/groups/g/export?format=trl")).json
    claimed = await proxy.claim(groups=10, format="trl")

    assert ["g"] == [group["group_id"] for group in claimed["groups"]]
    assert (exported, members, []) == tuple(claimed["groups"][0][name] for name in ("data", "rollouts", "skipped"))
    assert ("trl", "trainer", [], []) == tuple(claimed[name] for name in ("format", "consumer", "dropped", "refused"))


async def test_the_advantages_of_a_claim_are_those_of_an_export(proxy):
    """And so are its other options."""
    await proxy.group("g", 1, 0)
    exported = (await proxy.get("/groups/g/export?format=scored_data&advantage=rloo&prompt_logprob=0.5")).json
    claimed = await proxy.claim(format="scored_data", advantage="rloo", prompt_logprob=0.5)

    assert exported == claimed["groups"][0]["data"]
    assert ([1.0, 0.0], [1.0, -1.0]) == tuple(claimed["groups"][0][name] for name in ("rewards", "advantages"))
    assert 0.5 == exported["inference_logprobs"][0][0]


async def versions(proxy, **groups):
    """Groups sampled by these policy versions, in this order."""
    for name, version in groups.items():
        if version is not None:
            await proxy.put("/policy", {"version": version})
        await proxy.group(name, 1)


async def test_the_oldest_policy_version_comes_first_or_last(proxy):
    """As asked; the oldest of its tokens decides, and one whose version nobody knows is the oldest."""
    await versions(proxy, unknown=None, nine=9, ten=10)
    members = await proxy.group("both", None, finish=False)
    await proxy.put("/policy", {"version": 8})
    await proxy.chat(members[0])
    await proxy.finish(members[0])

    first = await proxy.claim(groups=10)
    await proxy.post(f"/batches/{first['batch_id']}/release")
    last = await proxy.claim(groups=10, order="newest")

    assert ["unknown", "both", "nine", "ten"] == [group["group_id"] for group in first["groups"]]
    assert [None, "8", "9", "10"] == [group["policy_version"] for group in first["groups"]]
    assert ["ten", "nine", "both", "unknown"] == [group["group_id"] for group in last["groups"]]


async def test_groups_that_are_too_stale_are_left_to_others_or_dropped(proxy):
    """As asked; both are told why, and what is dropped can still be looked at and exported."""
    await versions(proxy, old=1, new=3)
    kept = await proxy.claim(groups=10, max_staleness=1, stale="keep")
    await proxy.post(f"/batches/{kept['batch_id']}/release")
    dropped = await proxy.claim(groups=10, max_staleness=1)
    group = (await proxy.get("/groups/old")).json

    assert ["new"] == [group["group_id"] for group in kept["groups"]] == [one["group_id"] for one in dropped["groups"]]
    assert [["old"], []] == [[one["group_id"] for one in kept[name]] for name in ("refused", "dropped")]
    assert [[], ["old"]] == [[one["group_id"] for one in dropped[name]] for name in ("refused", "dropped")]
    assert ("dropped", "2 policy versions behind") == (group["status"], group["why"][20:44])
    assert 1 == len((await proxy.get("/groups/old/export")).json)
    assert [] == await names(proxy)


@pytest.mark.parametrize("version", [None, "main"])
async def test_what_cannot_be_told_to_be_fresh_is_stale(proxy, version):
    """A version that is no number, or none at all."""
    await versions(proxy, g=version)

    assert [] == await names(proxy, max_staleness=5, stale="keep")
    assert ["g"] == await names(proxy)


async def test_groups_as_old_as_is_allowed_are_fresh(proxy):
    """max_staleness counts versions behind the one announced."""
    await versions(proxy, g=1)
    await proxy.put("/policy", {"version": 4})

    assert [[], ["g"]] == [await names(proxy, max_staleness=most, stale="keep") for most in (2, 3)]


async def test_rewarded_groups_only_are_those_whose_rollouts_all_have_a_reward(proxy):
    """Others wait until they have, and their rewards can still be given."""
    _, bare = await proxy.group("g", 1, None)
    before = await proxy.claim(rewarded=True)
    patched = await proxy.patch(f"/rollouts/{bare}", {"reward": 0})

    assert ([], ["g"], "complete") == (
        before["groups"], [one["group_id"] for one in before["refused"]], await proxy.status("g")
    )  # fmt: skip
    assert 200 == patched.status
    assert ["g"] == await names(proxy, rewarded=True)


async def test_rewards_stay_as_they_are_from_when_the_group_is_claimed(proxy):
    """409, and nothing changes; the same again is no change, and metadata is none of the trainer's."""
    member, _ = await proxy.group("g", 1, 0)
    assert 200 == (await proxy.patch(f"/rollouts/{member}", {"reward": 2})).status
    claimed = await proxy.claim()
    (step,) = (await proxy.get(f"/rollouts/{member}/steps")).json["steps"]
    answers = [
        await proxy.patch(f"/rollouts/{member}", body)
        for body in (
            {"reward": 3},
            {"step_rewards": {step["step_id"]: 1}},
            {"advantages": 1},
            {"reward": 3, "metadata": {}},
        )
    ]
    same = await proxy.patch(f"/rollouts/{member}", {"reward": 2})
    metadata = await proxy.patch(f"/rollouts/{member}", {"metadata": {"seen": True}})
    rollout = (await proxy.get(f"/rollouts/{member}")).json

    assert [409] * 4 == [answer.status for answer in answers]
    assert [200, 200] == [same.status, metadata.status]
    assert (2.0, {}, None, {"seen": True}) == tuple(
        rollout[name] for name in ("reward", "step_rewards", "advantages", "metadata")
    )
    assert claimed["batch_id"] == rollout["claimed_by"]
    assert 2.0 == claimed["groups"][0]["data"][0]["reward"]


async def test_a_reward_given_while_a_group_is_claimed_is_in_the_batch_or_refused(proxy):
    """Never taken and left out: whoever was told 200 finds it in the batch."""
    for number in range(8):
        member, _ = await proxy.group(f"g{number}", 0, 0)
        claim = asyncio.ensure_future(proxy.claim())
        patched = await proxy.patch(f"/rollouts/{member}", {"reward": 1})
        claimed = (await claim)["groups"][0]["data"][0]["reward"]
        shown = (await proxy.get(f"/rollouts/{member}")).json["reward"]

        assert claimed == shown == (1 if patched.status == 200 else 0)


async def test_a_group_that_the_format_cannot_say_is_refused_and_waits_on(proxy):
    """The reason is told, the others are given, and its rewards can still be changed."""
    bare, _ = await proxy.group("bare", None, 1)
    await proxy.group("good", 1, 0)
    claimed = await proxy.claim(groups=10, format="scored_data")

    assert ["good"] == [group["group_id"] for group in claimed["groups"]]
    assert [("bare", True)] == [(one["group_id"], bare in one["why"]) for one in claimed["refused"]]
    assert "complete" == await proxy.status("bare")
    assert 200 == (await proxy.patch(f"/rollouts/{bare}", {"reward": 1})).status
    assert ["bare"] == await names(proxy, format="scored_data")


async def test_groups_that_are_not_worth_training_are_dropped_with_the_reason(proxy):
    """Rewards that are all equal, or too few rollouts with rows."""
    await proxy.group("equal", 1, 1)
    await proxy.group("mixed", 1, 0)
    claimed = await proxy.claim(groups=10, only_mixed=True)
    few = await proxy.claim(groups=10, min_group=3)

    assert (["mixed"], ["equal"]) == tuple(
        [group["group_id"] for group in claimed[name]] for name in ("groups", "dropped")
    )
    assert [] == few["groups"] == few["dropped"]  # one is held, the other gone
    assert "dropped" == await proxy.status("equal")


async def test_a_group_deleted_while_it_waits_is_passed_over(proxy, store):
    """Also where the deleting leaves its entry behind."""
    await proxy.group("gone", 1)
    await proxy.group("g", 1)
    await store.groups.drop("gone")

    assert ["g"] == await names(proxy)


async def test_a_store_that_fails_while_groups_are_rendered_leaves_none_held(proxy, store):
    """503, and the next claim gets them."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    store.failing.add("whole")
    answer = await proxy.post("/batches/claim", {"consumer": "trainer", "groups": 2})
    store.failing.clear()

    assert 503 == answer.status
    assert ["g1", "g2"] == sorted(await names(proxy))
