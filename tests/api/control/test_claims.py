"""Which groups a claim gets, and what becomes of the others."""

import asyncio
import contextlib

import aiohttp
import pytest

from proxy.api.control import claims
from storage.errors import StoreUnreachable
from storage.types import StepWrite


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

    assert [409] * 4 == [response.status for response in answers]
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
    await store.groups.delete("gone")

    assert ["g"] == await names(proxy)


async def test_a_store_that_fails_while_groups_are_rendered_leaves_none_held(proxy, store):
    """503, and the next claim gets them."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    store.failing.add("read_all")
    response = await proxy.post("/batches/claim", {"consumer": "trainer", "groups": 2})
    store.failing.clear()

    assert 503 == response.status
    assert ["g1", "g2"] == sorted(await names(proxy))


async def test_members_without_rows_are_named_and_in_no_list(proxy):
    """`rollouts`, `rewards` and `advantages` are of those that have rows; `rows` is parallel to `data`."""
    opened = await proxy.post("/groups", {"group_id": "g", "size": 4})
    first, silent, flagged, last = (rollout["rollout_id"] for rollout in opened.json["rollouts"])
    steps = [(await proxy.chat(member)).step_id for member in (first, last)]
    await proxy.post(f"/rollouts/{flagged}/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})
    for member, reward in ((first, 1), (silent, 0), (flagged, 0.5), (last, 0)):
        await proxy.finish(member, reward=reward)
    (group,) = (await proxy.claim(format="trl", advantage="rloo"))["groups"]

    assert ([first, last], [1.0, 0.0]) == (group["rollouts"], group["rewards"])
    assert group["data"]["reward"] == group["rewards"]
    assert group["advantages"] == pytest.approx([1 - 0.5 / 3, -0.5])  # all four rewards count
    assert [
        {"rollout_id": member, "step_ids": [step], "reward": reward, "advantage": advantage}
        for member, step, reward, advantage in zip((first, last), steps, (1.0, 0.0), group["advantages"], strict=True)
    ] == group["rows"]
    assert {silent: "it has no steps", flagged: "none of its steps has a row"} == {
        left["rollout_id"]: left["why"] for left in group["skipped"] if "step_id" not in left
    }


async def test_a_deleted_member_is_named(proxy):
    """Also one that was gone before the claim began."""
    gone, member = await proxy.group("g", 1, 0)
    await proxy.delete(f"/rollouts/{gone}")
    (group,) = (await proxy.claim())["groups"]

    assert [member] == group["rollouts"]
    assert [gone] == [left["rollout_id"] for left in group["skipped"]]


async def test_a_group_with_a_step_that_cannot_be_read_is_refused_and_the_others_are_given(proxy, store):
    """By the rollout's name; once that is deleted, the group is given without it."""
    bad, good = await proxy.group("damaged", 1, 0)
    await proxy.group("whole", 1, 0)
    stored = await store.get(bad)
    await store.append(StepWrite(bad, stored.incarnation, "broken", b"TT\x01 not a record"), now_ms=1)
    claimed = await proxy.claim(groups=10)
    exported = await proxy.get("/groups/damaged/export?report=true")
    rewarded = await proxy.patch(f"/rollouts/{bad}", {"reward": 3})
    await proxy.delete(f"/rollouts/{bad}")
    later = await proxy.claim(groups=10)

    assert ["whole"] == [group["group_id"] for group in claimed["groups"]]
    assert [("damaged", True)] == [(one["group_id"], bad in one["why"]) for one in claimed["refused"]]
    assert (200, [bad], [good]) == (
        exported.status,
        [left["rollout_id"] for left in exported.json["report"]["skipped"]],
        [row["rollout_id"] for row in exported.json["group"]],
    )
    assert 200 == rewarded.status
    assert [("damaged", [good])] == [(group["group_id"], group["rollouts"]) for group in later["groups"]]


@pytest.mark.parametrize("verb", ["read_all", "opened"])
async def test_a_claim_that_fails_half_way_leaves_every_reward_as_it_was(proxy, store, verb):
    """What it had taken waits again, and its rewards can be changed: those of groups that it had rendered, too."""
    members = [member for name in ("g1", "g2") for member in await proxy.group(name, 1, 0)]
    read, counted = store.read_all, []

    async def whole(name, limit):
        counted.append(name)
        if len(counted) == 4:
            raise StoreUnreachable("the test took the store away")
        return await read(name, limit)

    if verb == "read_all":
        store.read_all = whole
    else:
        store.batches.open, opening = away, store.batches.open
    failed = await proxy.post("/batches/claim", {"consumer": "trainer", "groups": 2})
    store.read_all = read
    if verb == "opened":
        store.batches.open = opening
    claimed_by = [(await proxy.get(f"/rollouts/{member}")).json["claimed_by"] for member in members]
    patched = [(await proxy.patch(f"/rollouts/{member}", {"reward": 5})).status for member in members]

    assert 503 == failed.status
    assert ([None] * 4, [200] * 4) == (claimed_by, patched)
    assert ["g1", "g2"] == sorted(await names(proxy))


async def away(*_, **__):
    raise StoreUnreachable("the test took the store away")


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_claim_that_ends_in_any_other_way_leaves_every_reward_as_it_was(proxy, store, monkeypatch, how):
    """A fault of ours, or a process that is told to stop."""
    members = await proxy.group("g", 1, 0)
    gather = claims.read_group_rows

    async def interrupted(*given, **named):
        await gather(*given, **named)
        raise RuntimeError if how == "failed" else asyncio.CancelledError

    monkeypatch.setattr(claims, "read_group_rows", interrupted)
    with contextlib.suppress(aiohttp.ClientError):
        assert 500 == (await proxy.post("/batches/claim", {"consumer": "trainer"})).status
    monkeypatch.setattr(claims, "read_group_rows", gather)
    patched = [(await proxy.patch(f"/rollouts/{member}", {"reward": 5})).status for member in members]

    assert [200, 200] == patched
    assert ["g"] == await names(proxy)


async def test_the_rewards_of_a_dropped_group_can_be_changed(proxy):
    """Nobody was given them."""
    members = await proxy.group("g", 1, 0)
    await proxy.claim(min_group=3)

    assert "dropped" == await proxy.status("g")
    assert 200 == (await proxy.patch(f"/rollouts/{members[0]}", {"reward": 5})).status


async def test_a_claim_that_lost_its_lease_leaves_the_rewards_of_whoever_has_the_group(proxy, store, monkeypatch):
    """They are frozen for that one now."""
    (member,) = await proxy.group("g", 1)
    render, going, go_on = claims.read_group_rows, asyncio.Event(), asyncio.Event()

    async def slow(*given, **named):
        found = await render(*given, **named)
        going.set()
        await go_on.wait()
        raise StoreUnreachable("the test took the store away") if named else found

    monkeypatch.setattr(claims, "read_group_rows", slow)
    first = asyncio.ensure_future(proxy.post("/batches/claim", {"consumer": "slow", "lease_s": 0.001}))
    await going.wait()
    monkeypatch.setattr(claims, "read_group_rows", render)
    second = await proxy.claim(wait_s=5)
    go_on.set()

    assert 503 == (await first).status
    assert ["g"] == [group["group_id"] for group in second["groups"]]
    assert 409 == (await proxy.patch(f"/rollouts/{member}", {"reward": 5})).status
