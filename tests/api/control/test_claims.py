"""The groups that a claim returns, drops and refuses."""

import asyncio
import contextlib

import aiohttp
import pytest
from tests.support.session import names_in

from proxy.api.control import claims
from storage.errors import StoreUnreachable
from storage.types import StepWrite


async def names(proxy, **body):
    return names_in(await proxy.claim(groups=10, **body))


async def test_a_claim_returns_complete_groups_in_the_requested_format(proxy):
    members = await proxy.group("g", 1, 0)
    await proxy.group("open", 1, finish=False)
    exported = (await proxy.get("/groups/g/export?format=trl")).json
    claimed = await proxy.claim(groups=10, format="trl")

    assert names_in(claimed) == ["g"]
    assert tuple(claimed["groups"][0][name] for name in ("data", "rollouts", "skipped")) == (exported, members, [])
    assert tuple(claimed[name] for name in ("format", "consumer", "dropped", "refused")) == ("trl", "trainer", [], [])


async def test_a_claim_and_an_export_with_the_same_options_return_the_same_data(proxy):
    await proxy.group("g", 1, 0)
    exported = (await proxy.get("/groups/g/export?format=scored_data&advantage=rloo&prompt_logprob=0.5")).json
    claimed = await proxy.claim(format="scored_data", advantage="rloo", prompt_logprob=0.5)

    assert exported == claimed["groups"][0]["data"]
    assert tuple(claimed["groups"][0][name] for name in ("rewards", "advantages")) == ([1.0, 0.0], [1.0, -1.0])
    assert exported["inference_logprobs"][0][0] == 0.5


async def record_versions(proxy, **groups):
    """Record groups that are sampled with these policy versions, in this order."""
    for name, version in groups.items():
        if version is not None:
            await proxy.put("/policy", {"version": version})
        await proxy.group(name, 1)


async def test_groups_are_ordered_by_their_oldest_policy_version(proxy):
    """An unknown version is the oldest; `order` reverses the order."""
    await record_versions(proxy, unknown=None)
    await proxy.put("/policy", {"version": 8})
    members = await proxy.group("both", None, finish=False)
    await record_versions(proxy, nine=9, ten=10)
    await proxy.chat(members[0])
    await proxy.finish(members[0], reward=1)

    first = await proxy.claim(groups=10)
    await proxy.release(first)
    last = await proxy.claim(groups=10, order="newest")

    assert names_in(first) == ["unknown", "both", "nine", "ten"]
    assert [group["policy_version"] for group in first["groups"]] == [None, "8", "9", "10"]
    assert names_in(last) == ["ten", "nine", "both", "unknown"]


async def test_stale_groups_are_dropped_or_with_stale_keep_refused(proxy):
    """The response has the reason; a dropped group can still be read and exported."""
    await record_versions(proxy, old=1, new=3)
    kept = await proxy.claim(groups=10, max_staleness=1, stale="keep")
    await proxy.release(kept)
    dropped = await proxy.claim(groups=10, max_staleness=1)
    group = (await proxy.get("/groups/old")).json

    assert names_in(kept) == names_in(dropped) == ["new"]
    assert [names_in(kept, name) for name in ("refused", "dropped")] == [["old"], []]
    assert [names_in(dropped, name) for name in ("refused", "dropped")] == [[], ["old"]]
    assert (group["status"], group["why"][20:44]) == ("dropped", "2 policy versions behind")
    assert len((await proxy.get("/groups/old/export")).json) == 1
    assert await names(proxy) == []


@pytest.mark.parametrize("version", [None, "main"])
async def test_a_group_is_stale_if_its_policy_version_is_not_a_number(proxy, version):
    await record_versions(proxy, g=version)

    assert await names(proxy, max_staleness=5, stale="keep") == []
    assert await names(proxy) == ["g"]


async def test_max_staleness_counts_versions_behind_the_current_one(proxy):
    await record_versions(proxy, g=1)
    await proxy.put("/policy", {"version": 4})

    assert [await names(proxy, max_staleness=limit, stale="keep") for limit in (2, 3)] == [[], ["g"]]


async def test_the_continuation_mode_and_metadata_of_a_claimed_rollout_can_be_changed(proxy):
    """They are no training signals."""
    (member,) = await proxy.group("g1", 1.0)
    await proxy.claim(groups=1, format="sequences")
    patched = await proxy.patch(f"/rollouts/{member}", {"continuation": "append", "metadata": {"a": 1}})

    assert (patched.status, patched.json["continuation"], patched.json["metadata"]) == (200, "append", {"a": 1})


async def test_rewards_of_a_claimed_group_cannot_be_changed(proxy):
    """A change is 409; the same value and metadata are accepted."""
    member, _ = await proxy.group("g", 1, 0)
    assert (await proxy.patch(f"/rollouts/{member}", {"reward": 2})).status == 200
    claimed = await proxy.claim()
    (step,) = await proxy.steps(member)
    responses = [
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

    assert [response.status for response in responses] == [409] * 4
    assert [same.status, metadata.status] == [200, 200]
    assert tuple(rollout[name] for name in ("reward", "step_rewards", "advantages", "metadata")) == (
        2.0,
        {},
        None,
        {"seen": True},
    )
    assert claimed["batch_id"] == rollout["claimed_by"]
    assert claimed["groups"][0]["data"][0]["reward"] == 2.0


async def test_a_reward_set_during_a_claim_is_in_the_batch_or_rejected(proxy):
    """If the PATCH is 200, the batch has the reward."""
    for number in range(8):
        member, _ = await proxy.group(f"g{number}", 0, 0)
        claim = asyncio.ensure_future(proxy.claim())
        patched = await proxy.patch(f"/rollouts/{member}", {"reward": 1})
        claimed = (await claim)["groups"][0]["data"][0]["reward"]
        shown = (await proxy.get(f"/rollouts/{member}")).json["reward"]

        assert claimed == shown == (1 if patched.status == 200 else 0)


async def test_a_group_that_the_format_cannot_express_is_refused_and_stays_in_the_queue(proxy):
    """The reason is in the response, other groups are returned, and its rewards can still be changed."""
    await proxy.group("good", 1, 0)
    forked = (await proxy.post("/groups", {"group_id": "forked", "size": 1})).json["rollouts"][0]["rollout_id"]
    for text in ("one", "two"):
        await proxy.chat(forked, {"role": "user", "content": text})
    await proxy.finish(forked, reward=1)
    claimed = await proxy.claim(groups=10, format="trl")
    patched = await proxy.patch(f"/rollouts/{forked}", {"reward": 2})
    longest = await proxy.claim(groups=10, format="trl", branches="longest")

    assert (names_in(claimed), patched.status) == (["good"], 200)
    assert [(group["group_id"], group["code"]) for group in claimed["refused"]] == [("forked", "forked")]
    assert all(part in claimed["refused"][0]["why"] for part in (forked, "2 sequences", "branches=longest"))
    assert claimed["reasons"] == {"refused": {"forked": 1}, "dropped": {}}
    (group,) = longest["groups"]
    (dropped,) = group["skipped"]
    assert (group["group_id"], [row["weight"] for row in group["rows"]]) == ("forked", [1.0])
    assert (
        dropped["rollout_id"], dropped["why"], dropped["dropped_tokens"] > 0
    ) == (forked, "not on the longest branch", True)  # fmt: skip


async def test_groups_with_equal_rewards_or_too_few_rows_are_dropped_with_the_reason(proxy):
    await proxy.group("equal", 1, 1)
    await proxy.group("mixed", 1, 0)
    claimed = await proxy.claim(groups=10, only_mixed=True)
    few = await proxy.claim(groups=10, min_group=3)

    assert tuple(names_in(claimed, name) for name in ("groups", "dropped")) == (["mixed"], ["equal"])
    assert few["groups"] == few["dropped"] == []  # one group is claimed, the other dropped
    assert claimed["reasons"] == {"refused": {}, "dropped": {"equal_rewards": 1}}
    assert claimed["waiting"] == {"available": 0, "claimed": 0}
    assert few["waiting"] == {"available": 0, "claimed": 1}
    (listed,) = (await proxy.get("/groups?status=dropped")).json["groups"]
    assert ("equal", "equal_rewards", claimed["dropped"][0]["why"]) == tuple(
        listed[name] for name in ("group_id", "code", "why")
    )
    metrics = (await proxy.get("/metrics")).text.decode()
    assert 'tokentape_dropped_groups_total{policy="default",reason="equal_rewards"} 1.0' in metrics
    assert 'tokentape_claim_wait_seconds_count{policy="default"} 2.0' in metrics


async def test_a_deleted_group_is_not_claimed(proxy, store):
    """Its queue entry may remain after the deletion."""
    await proxy.group("deleted", 1)
    await proxy.group("g", 1)
    await store.groups.delete("deleted")

    assert await names(proxy) == ["g"]


async def test_a_store_failure_during_a_claim_releases_its_groups(proxy, store):
    """The claim is 503."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    store.failing.add("read_each")
    response = await proxy.post("/batches/claim", {"consumer": "trainer", "groups": 2})
    store.failing.clear()

    assert response.status == 503
    assert sorted(await names(proxy)) == ["g1", "g2"]


async def test_members_without_rows_are_listed_in_skipped_only(proxy):
    """`rollouts`, `rewards` and `advantages` are parallel to the rollouts with rows, `rows` to `data`."""
    first, silent, flagged, last = await proxy.open_group("g", 4)
    steps = [(await proxy.chat(member)).step_id for member in (first, last)]
    await proxy.post(f"/rollouts/{flagged}/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})
    for member, reward in ((first, 1), (silent, 0), (flagged, 0.5), (last, 0)):
        await proxy.finish(member, reward=reward)
    (group,) = (await proxy.claim(format="trl", advantage="rloo"))["groups"]

    assert (group["rollouts"], group["rewards"]) == ([first, last], [1.0, 0.0])
    assert group["data"]["reward"] == group["rewards"]
    assert group["advantages"] == pytest.approx([1 - 0.5 / 3, -0.5])  # all four rewards count
    assert [
        {"rollout_id": member, "step_ids": [step], "reward": reward, "advantage": advantage, "weight": 1.0}
        for member, step, reward, advantage in zip((first, last), steps, (1.0, 0.0), group["advantages"], strict=True)
    ] == group["rows"]
    assert {entry["rollout_id"]: entry["why"] for entry in group["skipped"] if "step_id" not in entry} == {
        silent: "it has no steps",
        flagged: "none of its steps has a row",
    }


async def test_a_member_deleted_before_the_claim_is_listed_in_skipped(proxy):
    deleted, *members = await proxy.group("g", 1, 0, 1)
    await proxy.delete(f"/rollouts/{deleted}")
    (group,) = (await proxy.claim())["groups"]

    assert members == group["rollouts"]
    assert [entry["rollout_id"] for entry in group["skipped"]] == [deleted]


async def test_a_group_with_an_unreadable_step_is_refused_and_other_groups_are_claimed(proxy, store):
    """The reason names the rollout; without it the group is claimed."""
    bad, *good = await proxy.group("damaged", 1, 0, 1)
    await proxy.group("whole", 1, 0)
    stored = await store.get(bad)
    await store.append(StepWrite(bad, stored.incarnation, "broken", b"TT\x01 not a record"), now_ms=1)
    claimed = await proxy.claim(groups=10)
    exported = await proxy.get("/groups/damaged/export?report=true")
    rewarded = await proxy.patch(f"/rollouts/{bad}", {"reward": 3})
    await proxy.delete(f"/rollouts/{bad}")
    later = await proxy.claim(groups=10)

    assert names_in(claimed) == ["whole"]
    assert [(group["group_id"], group["code"], bad in group["why"]) for group in claimed["refused"]] == [
        ("damaged", "damaged_step", True)
    ]
    assert (
        exported.status,
        [entry["rollout_id"] for entry in exported.json["report"]["skipped"]],
        [row["rollout_id"] for row in exported.json["group"]],
    ) == (200, [bad], good)
    assert rewarded.status == 200
    assert [(group["group_id"], group["rollouts"]) for group in later["groups"]] == [("damaged", good)]


@pytest.mark.parametrize("verb", ["read", "opened"])
async def test_after_a_failed_claim_rewards_can_be_changed(proxy, store, verb):
    """The claim fails at a later group, or at storing the batch."""
    members = [member for name in ("g1", "g2") for member in await proxy.group(name, 1, 0)]
    read, reads = store.read_each, []

    async def fail_at_the_second(names, limit):
        reads.append(names)
        if len(reads) == 2:
            raise StoreUnreachable("the test took the store away")
        return await read(names, limit)

    if verb == "read":
        store.read_each = fail_at_the_second
    else:
        store.batches.open, opening = unreachable, store.batches.open
    failed = await proxy.post("/batches/claim", {"consumer": "trainer", "groups": 2})
    store.read_each = read
    if verb == "opened":
        store.batches.open = opening
    claimed_by = [(await proxy.get(f"/rollouts/{member}")).json["claimed_by"] for member in members]
    patched = [(await proxy.patch(f"/rollouts/{member}", {"reward": 5})).status for member in members]

    assert failed.status == 503
    assert (claimed_by, patched) == ([None] * 4, [200] * 4)
    assert sorted(await names(proxy)) == ["g1", "g2"]


async def unreachable(*_, **__):
    raise StoreUnreachable("the test took the store away")


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_after_a_cancelled_or_crashed_claim_rewards_can_be_changed(proxy, store, monkeypatch, end):
    members = await proxy.group("g", 1, 0)
    gather = claims.read_group_rows

    async def interrupted(*args, **named):
        await gather(*args, **named)
        raise RuntimeError if end == "failed" else asyncio.CancelledError

    monkeypatch.setattr(claims, "read_group_rows", interrupted)
    with contextlib.suppress(aiohttp.ClientError):
        assert (await proxy.post("/batches/claim", {"consumer": "trainer"})).status == 500
    monkeypatch.setattr(claims, "read_group_rows", gather)
    patched = [(await proxy.patch(f"/rollouts/{member}", {"reward": 5})).status for member in members]

    assert patched == [200, 200]
    assert await names(proxy) == ["g"]


async def test_the_rewards_of_a_dropped_group_can_be_changed(proxy):
    members = await proxy.group("g", 1, 0)
    await proxy.claim(min_group=3)

    assert await proxy.status("g") == "dropped"
    assert (await proxy.patch(f"/rollouts/{members[0]}", {"reward": 5})).status == 200


async def test_a_failed_claim_that_lost_its_lease_does_not_unfreeze_the_rewards_of_the_next_claim(
    proxy, store, monkeypatch
):
    (member,) = await proxy.group("g", 1)
    render, started, proceed = claims.read_group_rows, asyncio.Event(), asyncio.Event()

    async def slow(*args, **named):
        found = await render(*args, **named)
        started.set()
        await proceed.wait()
        raise StoreUnreachable("the test took the store away") if named else found

    monkeypatch.setattr(claims, "read_group_rows", slow)
    first = asyncio.ensure_future(proxy.post("/batches/claim", {"consumer": "slow", "lease_s": 0.001}))
    await started.wait()
    monkeypatch.setattr(claims, "read_group_rows", render)
    second = await proxy.claim(wait_s=5)
    proceed.set()

    assert (await first).status == 503
    assert names_in(second) == ["g"]
    assert (await proxy.patch(f"/rollouts/{member}", {"reward": 5})).status == 409


async def test_a_claim_takes_groups_of_other_parts_of_the_store_if_one_is_unreachable(proxy, store, monkeypatch):
    """If it has none, it is 503."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    lease = store.queue.claim

    async def claim(queued, *arguments, **named):
        if queued.group == "g1":
            raise StoreUnreachable("the test took the store away")
        return await lease(queued, *arguments, **named)

    monkeypatch.setattr(store.queue, "claim", claim)
    first = await names(proxy)
    second = await proxy.post("/batches/claim", {"consumer": "trainer", "groups": 2})
    monkeypatch.setattr(store.queue, "claim", lease)

    assert (first, second.status, await names(proxy)) == (["g2"], 503, ["g1"])
