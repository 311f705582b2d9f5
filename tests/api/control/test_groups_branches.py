"""Branches of a rollout and the values of its states, through the API."""

from tests.support.branched import STEPS, Call, branch, mark, record, replay


async def test_branches_are_listed_with_their_steps_and_rewards(proxy, store):
    """With a playback that branches nowhere, and without a rollout that was deleted."""
    source = await record(store, "a/b", *STEPS)
    await branch(store, source, "s1", "b0", "x", reward=1.0, status="completed")
    await branch(store, source, "s2", "b1", reached=False, group_id="g")
    await replay(store, source, "p")
    await mark(store, source, rollouts=("b0", "b1", "gone", "p"))
    shown = (await proxy.get("/rollouts/a%2Fb/branches")).json
    first = {
        "rollout_id": "b0",
        "group_id": None,
        "status": "completed",
        "reward": 1.0,
        "before": "s1",
        "branched": True,
    }
    open_one = {"status": "open", "reward": None, "branched": False}

    assert shown["rollout_id"] == "a/b"
    assert shown["branches"] == [
        first,
        {"rollout_id": "b1", "group_id": "g", "before": "s2", **open_one},
        {"rollout_id": "p", "group_id": None, **open_one},
    ]


async def test_branches_of_an_unknown_rollout_are_404_and_one_without_any_has_none(proxy):
    await proxy.chat("r1")

    assert (await proxy.get("/rollouts/r2/branches")).status == 404
    assert (await proxy.get("/rollouts/r1/branches")).json == {"rollout_id": "r1", "branches": []}


async def test_values_are_shown_by_state_and_version(proxy, store):
    """Of the three branches before s1, one has no reward."""
    source = await record(store, "a/b", *STEPS)
    for name, reward in (("b0", 1.0), ("b1", 0.0), ("b2", None)):
        await branch(store, source, "s1", name, "x", reward=reward)
    await branch(store, source, None, "c0", "x", reward=0.25)
    await mark(store, source, rollouts=("b0", "b1", "b2", "c0"))
    shown = (await proxy.get("/rollouts/a%2Fb/values")).json
    entry = {"policy": "default", "branches": 1, "value": 0.25, "count": 1, "std": 0.0}
    beginning = {"step_id": "s0", "index": 0, **entry}
    state = {"step_id": "s1", "index": 1, **entry, "branches": 3, "value": 0.5, "count": 2, "std": 0.5}

    assert shown["rollout_id"] == "a/b"
    assert [{k: v for k, v in it.items() if k != "versions"} for it in shown["values"]] == [beginning, state]
    assert [
        [{"policy_versions": ["1"], "value": it["value"], "count": it["count"], "std": it["std"]}]
        for it in (entry, state)
    ] == [it["versions"] for it in shown["values"]]


async def test_values_of_another_version_are_409_unless_any_counts(proxy, store):
    source = await record(store, "r1", *STEPS)
    await branch(store, source, "s1", "b0", Call("x", "2"), reward=1.0)
    await mark(store, source, rollouts=("b0",))
    refused = await proxy.get("/rollouts/r1/values")
    shown = await proxy.get("/rollouts/r1/values?any_version=true")

    assert (refused.status, refused.json["error"]["param"]) == (409, "any_version")
    assert [value["value"] for value in shown.json["values"]] == [1.0]


async def test_values_of_an_unknown_rollout_are_404_and_one_without_branches_has_none(proxy):
    await proxy.chat("r1")

    assert (await proxy.get("/rollouts/r2/values")).status == 404
    assert (await proxy.get("/rollouts/r1/values")).json == {"rollout_id": "r1", "values": []}
