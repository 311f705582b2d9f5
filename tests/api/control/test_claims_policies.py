"""Claims of several policies: each takes a group once, independently of the others."""

import asyncio

import aiohttp
import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session, names_in

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

POLICIES = {
    "planner": {"models": ["planner", "planner-*"]},
    "coder": {"models": ["coder"]},
    "judge": {"models": ["judge"], "train": False},
}


@pytest.fixture
def sections():
    return {"policies": POLICIES}


async def record(proxy, name, *members, rewards=(1, 0, 0.5, 2)):
    """Record a group; each member is a list of the models of its calls."""
    opened = (await proxy.post("/groups", {"group_id": name, "size": len(members)})).json["rollouts"]
    names = [rollout["rollout_id"] for rollout in opened]
    for rollout, models, reward in zip(names, members, rewards, strict=False):
        for model in models:
            await proxy.chat(rollout, model=model)
        await proxy.finish(rollout, reward=reward)
    return names


async def settle(proxy, batch, verb, **body):
    return await proxy.post(f"/batches/{batch['batch_id']}/{verb}", body)


BOTH = ["planner-1", "coder", "judge"]


async def test_a_group_is_claimed_once_for_each_policy_with_its_own_steps(proxy):
    members = await record(proxy, "g", BOTH, BOTH)
    planner = await proxy.claim(policy="planner")
    again = await proxy.claim(policy="planner")
    coder = await proxy.claim(policy="coder")
    models = {}
    for claimed in (planner, coder):
        steps = [step for row in claimed["groups"][0]["rows"] for step in row["step_ids"]]
        shown = [await proxy.steps(member) for member in members]
        asked = {step["step_id"]: step["request"]["model"] for found in shown for step in found}
        models[claimed["policy"]] = [asked[step] for step in steps]
    rewards = [claimed["groups"][0]["rewards"] for claimed in (planner, coder)]

    assert models == {"planner": ["planner-1"] * 2, "coder": ["coder"] * 2}
    assert rewards == [[1.0, 0.0]] * 2
    assert (again["groups"], again["policy"], again["waiting"]) == ([], "planner", {"available": 0, "claimed": 1})


async def test_the_state_of_a_group_is_shown_for_each_policy(proxy):
    """The status of the group is the first one that it has in: open, complete, claimed, done, dropped."""
    opened = (await proxy.post("/groups", {"group_id": "open", "size": 1})).json
    await record(proxy, "g", BOTH, BOTH)
    seen = [(await proxy.get("/groups/g")).json]
    planner = await proxy.claim(policy="planner")
    seen.append((await proxy.get("/groups/g")).json)
    coder = await proxy.claim(policy="coder", min_group=3)
    seen.append((await proxy.get("/groups/g")).json)
    await settle(proxy, planner, "ack")
    seen.append((await proxy.get("/groups/g")).json)

    assert [group["status"] for group in seen] == ["complete", "complete", "claimed", "done"]
    assert [{name: state["status"] for name, state in group["policies"].items()} for group in seen] == [
        {"coder": "complete", "planner": "complete"},
        {"coder": "complete", "planner": "claimed"},
        {"coder": "dropped", "planner": "claimed"},
        {"coder": "dropped", "planner": "done"},
    ]
    assert (planner["batch_id"], "trainer") == tuple(
        seen[1]["policies"]["planner"][name] for name in ("batch_id", "consumer")
    )
    assert names_in(coder, "dropped") == ["g"]
    assert seen[3]["policies"]["coder"]["code"] == "too_few_members"
    assert ("open" if opened else "", (await proxy.get("/groups/open")).json["policies"]) == ("open", {})


async def test_groups_are_listed_by_their_status_for_a_policy(proxy):
    """Open groups have none yet; a policy without steps in a complete group does not have it."""
    await record(proxy, "both", BOTH, BOTH)
    await record(proxy, "coder", ["coder"], ["coder"])
    await proxy.post("/groups", {"group_id": "open", "size": 1})
    await settle(proxy, await proxy.claim(policy="planner"), "ack")

    async def listed(query):
        return sorted(group["group_id"] for group in (await proxy.get(f"/groups?{query}")).json["groups"])

    assert await listed("status=complete") == await listed("status=complete&policy=coder") == ["both", "coder"]
    assert (
        await listed("status=complete&policy=planner"),
        await listed("status=done&policy=planner"),
    ) == ([], ["both"])
    assert await listed("policy=planner") == ["both", "open"]
    assert await listed("status=open&policy=planner") == ["open"]
    assert (await proxy.get("/groups?policy=writer")).status == 404


async def test_a_claim_names_one_policy_that_is_trained(proxy):
    """A policy is required if several are trained."""
    await record(proxy, "g", BOTH, BOTH)
    bodies = [{}, {"policy": "judge"}, {"policy": "writer"}, {"policy": 5}, {"policy": "default"}]
    responses = [await proxy.post("/batches/claim", {"consumer": "t", **body}) for body in bodies]

    assert [response.status for response in responses] == [422, 422, 404, 422, 422]
    assert [response.json["error"]["param"] for response in responses] == ["policy"] * 5
    assert "planner, coder" in responses[0].json["error"]["message"]
    assert await proxy.status("g") == "complete"


async def test_a_claim_for_a_policy_that_no_group_has_is_empty(proxy):
    """The response counts only groups of the policy as waiting."""
    await record(proxy, "g", ["coder"], ["coder"])
    claimed = await proxy.claim(policy="planner")

    assert tuple(claimed[name] for name in ("batch_id", "groups", "policy")) == (None, [], "planner")
    assert tuple(claimed[name] for name in ("waiting", "dropped", "refused")) == (
        {"available": 0, "claimed": 0},
        [],
        [],
    )


async def test_a_group_without_steps_of_a_trained_policy_is_for_all_of_them(proxy):
    """Each drops it with the reason, so that no group is lost silently."""
    names = await record(proxy, "g", ["judge"], [])
    claims = [await proxy.claim(policy=policy) for policy in ("planner", "coder")]
    kept = await proxy.claim(policy="planner", members="all")

    assert [[group["code"] for group in claimed["dropped"]] for claimed in claims] == [["too_few_members"]] * 2
    assert (await proxy.status("g"), kept["refused"]) == ("dropped", [])
    assert (await proxy.patch(f"/rollouts/{names[0]}", {"reward": 5})).status == 200


async def test_a_member_without_steps_of_the_policy_is_skipped_with_the_reason(proxy):
    """Steps of other policies are skipped in every member. With members=all the claim refuses the group."""
    first, second, last = await record(proxy, "g", BOTH, ["coder"], ["planner", "coder"])
    refused = await proxy.claim(policy="planner", members="all")
    (group,) = (await proxy.claim(policy="planner"))["groups"]
    (other,) = (await proxy.claim(policy="coder", members="all"))["groups"]

    assert [entry["code"] for entry in refused["refused"]] == ["no_rows"]
    assert {
        (entry["rollout_id"], entry["why"].removeprefix("its policy is ").removesuffix(", not planner"))
        for entry in group["skipped"]
        if "step_id" in entry
    } == {(first, "coder"), (first, "judge"), (second, "coder"), (last, "coder")}
    assert [entry for entry in group["skipped"] if "step_id" not in entry] == [
        {"rollout_id": second, "why": "none of its steps has a row"}
    ]
    assert (group["rollouts"], group["rewards"]) == ([first, last], [1.0, 0.5])
    assert other["rollouts"] == [first, second, last]


async def test_the_version_and_the_staleness_are_the_policys(proxy):
    await proxy.put("/policies/planner", {"version": 3})
    await proxy.put("/policies/coder", {"version": 10})
    await record(proxy, "g", BOTH, BOTH)
    await proxy.put("/policies/coder", {"version": 12})
    stale = await proxy.claim(policy="coder", max_staleness=1, stale="keep")
    coder = await proxy.claim(policy="coder", max_staleness=2)
    planner = await proxy.claim(policy="planner", max_staleness=0)
    shown = (await proxy.get("/groups/g")).json

    assert [group["code"] for group in stale["refused"]] == ["stale"]
    assert tuple(
        value
        for claimed in (coder, planner)
        for value in (claimed["policy_version"], claimed["groups"][0]["policy_version"])
    ) == ("12", "10", "3", "3")
    assert (
        shown["policy_version"], *(shown["policies"][name]["policy_version"] for name in ("coder", "planner"))
    ) == (None, "10", "3")  # fmt: skip


async def test_an_exact_claim_counts_the_groups_of_its_policy(proxy):
    """Groups of another policy do not complete it."""
    await record(proxy, "one", BOTH, BOTH)
    await record(proxy, "two", ["coder"], ["coder"])
    few = await proxy.claim(policy="planner", exact=True, groups=2)
    both = await proxy.claim(policy="coder", exact=True, groups=2)

    assert (few["batch_id"], sorted(names_in(both))) == (None, ["one", "two"])
    assert names_in(await proxy.claim(policy="planner", exact=True)) == ["one"]


@pytest.mark.parametrize("first", ["planner", "coder"])
async def test_the_last_acknowledgement_that_deletes_a_group_deletes_it(proxy, first):
    """The response of the others names it in `kept`; a retry has the same response."""
    members = await record(proxy, "g", BOTH, BOTH)
    last = {"planner": "coder", "coder": "planner"}[first]
    batches = {policy: await proxy.claim(policy=policy) for policy in (first, last)}
    acks = [await settle(proxy, batches[first], "ack", delete=True) for _ in range(2)]
    kept = await proxy.status("g")
    ended = await settle(proxy, batches[last], "ack", delete=True)

    assert [{"batch_id": batches[first]["batch_id"], "acked": ["g"], "lost": [], "kept": ["g"]}] * 2 == [
        ack.json for ack in acks
    ]
    assert ("claimed", {"batch_id": batches[last]["batch_id"], "acked": ["g"], "lost": []}) == (kept, ended.json)
    assert [
        (await proxy.get(f"/{path}")).status for path in ("groups/g", *(f"rollouts/{name}" for name in members))
    ] == [404] * 3


async def test_concurrent_acknowledgements_delete_a_group_once_the_last_is_done(proxy):
    for number in range(5):
        await record(proxy, f"g{number}", BOTH, BOTH)
        batches = [await proxy.claim(policy=policy) for policy in ("planner", "coder")]
        await asyncio.gather(*(settle(proxy, batch, "ack", delete=True) for batch in batches))

        assert (await proxy.get(f"/groups/g{number}")).status == 404


async def test_a_group_that_is_dropped_for_a_policy_does_not_keep_it_from_being_deleted(proxy):
    await record(proxy, "g", BOTH, BOTH)
    await proxy.claim(policy="coder", min_group=3)
    acked = await settle(proxy, await proxy.claim(policy="planner"), "ack", delete=True)

    assert (acked.status, (await proxy.get("/groups/g")).status) == (200, 404)


async def test_release_and_extend_work_on_the_queue_of_the_policy(proxy):
    await record(proxy, "g", BOTH, BOTH)
    planner, coder = await proxy.claim(policy="planner"), await proxy.claim(policy="coder")
    extended = await settle(proxy, planner, "extend", lease_s=99)
    released = await settle(proxy, planner, "release")
    other = await proxy.claim(policy="planner", consumer="other")
    states = (await proxy.get("/groups/g")).json["policies"]

    assert (extended.json["held"], released.json["released"], names_in(other)) == (["g"], ["g"], ["g"])
    assert (coder["batch_id"], other["batch_id"]) == tuple(states[name]["batch_id"] for name in ("coder", "planner"))


async def test_a_group_without_sampled_tokens_has_too_few_members_and_no_age(proxy):
    """Its agents made no calls, or none of a trained policy."""
    await proxy.put("/policies/planner", {"version": 3})
    await record(proxy, "idle", [], [])
    await record(proxy, "judged", ["judge"], ["judge"])
    claimed = await proxy.claim(policy="planner", max_staleness=1)

    assert {dropped["group_id"]: dropped["code"] for dropped in claimed["dropped"]} == {
        "idle": "too_few_members",
        "judged": "too_few_members",
    }


async def test_deleting_a_group_removes_it_from_all_queues(proxy, store):
    await record(proxy, "g", BOTH, BOTH)
    await proxy.delete("/groups/g")
    claims = [await proxy.claim(policy=policy) for policy in ("planner", "coder")]

    assert [claimed["groups"] for claimed in claims] == [[], []]
    assert [(await store.queue.counts(policy))[:2] for policy in ("planner", "coder")] == [(0, 0)] * 2


async def test_metrics_have_the_policy(proxy):
    await record(proxy, "one", BOTH, BOTH)
    await record(proxy, "two", BOTH, BOTH)
    await proxy.claim(policy="planner", max_staleness=1, stale="keep")
    await proxy.claim(policy="planner", min_group=3)
    await settle(proxy, await proxy.claim(policy="coder"), "ack")
    lines = (await proxy.get("/metrics")).text.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tokentape_"))
    expected = {
        'complete_groups{policy="coder"}': 1,
        'complete_groups{policy="planner"}': 0,
        'complete_groups{policy="default"}': 0,
        'claimed_groups{policy="coder"}': 0,
        'group_events_total{event="complete",policy="planner"}': 2,
        'group_events_total{event="claimed",policy="coder"}': 1,
        'group_events_total{event="done",policy="coder"}': 1,
        'group_events_total{event="done",policy="planner"}': 0,
        'group_events_total{event="dropped",policy="planner"}': 2,
        'refused_groups_total{policy="planner",reason="unknown_version"}': 2,
        'dropped_groups_total{policy="planner",reason="too_few_members"}': 2,
        'claim_wait_seconds_count{policy="planner"}': 2,
    }

    assert {name: float(values[f"tokentape_{name}"]) for name in expected} == expected


async def test_the_only_policy_that_is_trained_needs_no_name(store):
    """The response names it."""
    policies = {"default": {"train": True}, "judge": {"models": ["judge"], "train": False}}
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        aiohttp.ClientSession() as http,
        running(settings_for(engine, policies=policies), store) as served,
    ):
        proxy = Session(http, served.url)
        await record(proxy, "g", ["other", "judge"], ["other"])
        claimed = await proxy.claim()

        assert (names_in(claimed), claimed["policy"]) == (["g"], "default")
