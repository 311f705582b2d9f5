"""Consumers of batches are killed, and one of their two proxies: each group is trained once."""

from collections import Counter

import orjson
import pytest
from tests.support.killed_consumers import check_leases, consume, events

POLICIES = {
    "planner": {"models": ["planner", "planner-*"]},
    "coder": {"models": ["coder"]},
    "judge": {"models": ["judge"], "train": False},
}


@pytest.fixture
def sections():
    return {"policies": POLICIES}


async def record(proxy, group):
    """Record a group of two rollouts that have a call of each policy, with the rewards 1 and 0."""
    opened = (await proxy.post("/groups", {"group_id": group, "size": 2})).json["rollouts"]
    for rollout, reward in zip(opened, (1, 0), strict=True):
        for model in ("planner-1", "coder", "judge"):
            await proxy.chat(rollout["rollout_id"], model=model)
        await proxy.finish(rollout["rollout_id"], reward=reward)


@pytest.mark.parametrize("sections", [{}])
async def test_when_consumers_and_a_proxy_are_killed_no_group_is_lost_or_claimed_twice_at_once(
    proxy, store, server, tmp_path
):
    """Consumer processes use two proxies; some of them and one proxy are killed. Exact claims have two groups or none."""
    groups = {f"g{number}" for number in range(24)}
    for name in groups:
        await proxy.group(name, 1, 0)

    async def done():
        return len(await names_done(proxy))

    log = tmp_path / "log"
    await consume(server, store._store.layout.prefix, log, done, len(groups))

    holds, acked = events(log, "claimed"), Counter(group for _, group in events(log, "acked"))
    assert groups == await names_done(proxy)
    assert set(acked.values()) == {1}
    assert {0, 2} >= {count for (count,) in events(log, "exact")} >= {2}
    assert len(holds) > len(groups)  # consumers that were killed lost some of theirs
    check_leases(holds)


async def names_done(proxy):
    listed = (await proxy.get("/groups?status=done")).json
    return {group["group_id"] for group in listed["groups"]}


async def test_two_policies_take_each_group_once_although_consumers_and_a_proxy_are_killed(
    proxy, store, server, tmp_path
):
    """Consumers of two policies use two proxies; both policies get the same rewards."""
    names = {f"g{number}" for number in range(12)}
    for name in names:
        await record(proxy, name)
    of_both = {policy + name for policy in ("planner", "coder") for name in names}

    async def done():
        listed = [(await proxy.get(f"/groups?status=done&policy={policy}")).json for policy in ("planner", "coder")]
        return sum(len(found["groups"]) for found in listed)

    settings = {"TOKENTAPE_POLICIES": orjson.dumps(POLICIES).decode()}
    log = tmp_path / "log"
    await consume(
        server, store._store.layout.prefix, log, done, len(of_both), policies=("planner", "coder"), settings=settings
    )

    assert dict.fromkeys(names, "done") == {name: await proxy.status(name) for name in names}
    assert dict.fromkeys(of_both, 1) == {**dict.fromkeys(of_both, 1), **Counter(g for _, g in events(log, "acked"))}
    assert {tuple(rewards) for _, rewards in events(log, "rewards")} == {(1.0, 0.0)}
    check_leases(events(log, "claimed"))
