"""Branches of a rollout: opened as a group of playbacks, listed, and the values of states."""

import asyncio
from unittest.mock import patch

import pytest
from tests.support.branched import STEPS, Call, branch, mark, record, replay
from tests.support.fakes import settings_for
from tests.support.session import Session
from tests.support.stored import stored_rollout, stored_steps

from proxy.server.listener import running
from storage.errors import StoreUnreachable


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


PATH = "/rollouts/r1/branches"


async def opened(proxy, before, count=2, path=PATH, **fields):
    response = await proxy.post(path, {"before": before, "count": count, **fields})
    assert response.status == 201, response.text
    return [rollout["rollout_id"] for rollout in response.json["rollouts"]]


async def sampled(store, rollout):
    """Return for each step of a rollout whether it was sampled there."""
    return [step.inherited is None for step in await stored_steps(store, rollout)]


async def test_branches_repeat_the_rollout_up_to_the_step_and_are_sampled_from_it_on(proxy, store):
    """They are a group, as of POST /groups; each repeats two steps of three."""
    steps = await proxy.turns("r1", 3)
    response = await proxy.post(PATH, {"group_id": "g", "before": steps[2], "count": 2, "metadata": {"x": 1}})
    members = [rollout["rollout_id"] for rollout in response.json["rollouts"]]
    played = [await proxy.turns(member, 3) for member in members]
    group = (await proxy.get("/groups/g")).json

    assert (
        response.status, *(response.json[name] for name in ("group_id", "size", "status", "metadata"))
    ) == (201, "g", 2, "open", {"x": 1})  # fmt: skip
    assert members == [rollout["rollout_id"] for rollout in group["rollouts"]]
    for member, own in zip(members, played, strict=True):
        assert steps[:2] == own[:2]
        assert steps[2] != own[2]
        assert await sampled(store, member) == [False, False, True]
        assert (await stored_rollout(store, member)).has_branched


async def test_a_source_lists_its_branches_and_their_values(proxy):
    """V = (1 + 0) / 2; the reward of the source is 1, and its first two steps have the mean 0.25 of the other rollout."""
    for member, reward in zip(sources := await proxy.open_group("g", 2), (1, 0.25), strict=True):
        steps = await proxy.turns(member, 3)
        await proxy.finish(member, reward=reward)
    source = sources[0]
    steps = [step["step_id"] for step in await proxy.steps(source)]
    members = await opened(proxy, steps[2], path=f"/rollouts/{source}/branches", group_id="b")
    for member, reward in zip(members, (1, 0), strict=True):
        await proxy.turns(member, 3)
        await proxy.finish(member, reward=reward)
    listed = (await proxy.get(f"/rollouts/{source}/branches")).json["branches"]
    (value,) = (await proxy.get(f"/rollouts/{source}/values")).json["values"]
    (row,) = (await proxy.get(f"/rollouts/{source}/export?advantage=vine")).json["rows"]
    grpo = (await proxy.get("/groups/b/export?advantage=grpo")).json

    assert [(steps[2], True, 1), (steps[2], True, 0)] == [
        (branch["before"], branch["branched"], branch["reward"]) for branch in listed
    ]
    assert (steps[2], 2, 0.5, 2) == tuple(value[name] for name in ("step_id", "index", "value", "count"))
    assert dict(zip(steps, (0.25, 0.25, 0.5), strict=True)) == row["advantages"]
    assert [row["advantages"] for row in grpo] == [1.0, -1.0]


async def test_opening_branches_is_idempotent(proxy, store, http):
    """Repeated and at once, through two processes; another body is 409, and one without a name opens others."""
    steps = await proxy.turns("r1", 2)
    body = {"group_id": "g", "before": steps[1], "count": 2}
    async with running(settings_for(None), store) as other:
        clients = [proxy, Session(http, other.url)] * 3
        first, *others = await asyncio.gather(*(client.post(PATH, body) for client in clients))
    refused = await proxy.post(PATH, {**body, "count": 3})

    assert sorted([first.status, *(repeated.status for repeated in others)]) == [200] * 5 + [201]
    keys = [[(it["rollout_id"], it["api_key"]) for it in response.json["rollouts"]] for response in (first, *others)]
    assert keys == keys[:1] * 6
    assert (refused.status, refused.json["error"]["param"]) == (409, "group_id")
    assert len((await proxy.get(PATH)).json["branches"]) == 2
    assert await opened(proxy, steps[1]) != await opened(proxy, steps[1])


@pytest.mark.parametrize("path", ["/groups", PATH, "/rollouts"])
async def test_a_repeated_opening_marks_the_source_if_the_first_one_failed_before(proxy, store, path):
    """The store fails once after the playback is opened."""
    steps = await proxy.turns("r1", 2)
    terms = {"playback": {"of": "r1", "before": steps[1]}}
    body = {
        "/groups": {"group_id": "g", "size": 1, "rollout": terms},
        PATH: {"group_id": "g", "before": steps[1], "count": 1},
        "/rollouts": {"rollout_id": "p1", **terms},
    }[path]
    mark = store.mark
    with patch.object(store, "mark", side_effect=StoreUnreachable("gone")):
        failed = await proxy.post(path, body)
    with patch.object(store, "mark", mark):
        repeated = await proxy.post(path, body)

    assert (failed.status, repeated.status) == (503, 200)
    assert len((await proxy.get(PATH)).json["branches"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"before": "gone"}, 404, "playback"),
        ({"count": 0}, 422, "count"),
        ({"count": 10_000}, 422, "count"),
        ({"count": 600, "over_sample": 600}, 422, None),
        ({"count": "2"}, 422, "count"),
        ({"presets": ["unknown"]}, 422, "presets"),
        ({"ignore": ["*"]}, 422, "ignore"),
        ({"ignore": ["a\nb"]}, 422, "ignore"),
        ({"rollout": {"playback": {"of": "r1"}}}, 422, None),
        ({"through": "s"}, 422, "through"),
        ({"before": ""}, 422, "before"),
    ],
)
async def test_invalid_branches_are_refused_and_nothing_is_opened(proxy, body, status, param):
    steps = await proxy.turns("r1", 2)
    response = await proxy.post(PATH, {"before": steps[1], "count": 2, **body})

    assert (response.status, response.json["error"]["param"]) == (status, param), response.text
    assert [rollout["rollout_id"] for rollout in (await proxy.get("/rollouts")).json["rollouts"]] == ["r1"]


async def test_branches_of_an_unknown_or_deleted_rollout_are_404(proxy):
    steps = await proxy.turns("r1", 2)
    await proxy.delete("/rollouts/r1")

    for name in ("r1", "r2"):
        assert (await proxy.post(f"/rollouts/{name}/branches", {"before": steps[1], "count": 1})).status == 404


async def test_branches_of_the_beginning_are_sampled_at_once(proxy, store):
    """With another prompt as well; they are the value of the beginning."""
    await proxy.turns("r1", 2)
    member, other = await opened(proxy, None)
    await proxy.turns(member, 1)
    await proxy.chat(other, {"role": "user", "content": "another prompt"})
    for name, reward in ((member, 1), (other, 0.5)):
        await proxy.finish(name, reward=reward)
    (value,) = (await proxy.get("/rollouts/r1/values")).json["values"]

    assert await sampled(store, member) == await sampled(store, other) == [True]
    assert tuple(value[name] for name in ("index", "value", "count")) == (0, 0.75, 2)


async def test_a_rollout_without_steps_has_branches_of_its_beginning(proxy, store):
    await proxy.open("r1")
    (member,) = await opened(proxy, None, 1)
    await proxy.turns(member, 1)
    await proxy.finish(member, reward=0.5)
    (value,) = (await proxy.get("/rollouts/r1/values")).json["values"]

    assert await sampled(store, member) == [True]
    assert tuple(value[name] for name in ("step_id", "index", "value")) == (None, 0, 0.5)


async def test_branches_have_the_terms_of_the_source_and_given_ones_replace_them(proxy, store):
    """Not its limits and metadata."""
    terms = {"sampling": {"default": {"temperature": 0.5}}, "metadata": {"x": 1}, "limits": {"max_steps": 9}}
    await proxy.open("r1", **terms)
    steps = await proxy.turns("r1", 2)
    (plain,) = await opened(proxy, steps[1], 1)
    (other,) = await opened(proxy, steps[1], 1, rollout={"sampling": {"default": {"temperature": 0.25}}})

    found = [await stored_rollout(store, name) for name in (plain, other)]
    assert [rollout.sampling.default for rollout in found] == [{"temperature": 0.5}, {"temperature": 0.25}]
    assert [(rollout.metadata, rollout.limits.max_steps) for rollout in found] == [({}, None)] * 2


async def test_texts_to_ignore_count_as_equal(proxy, store):
    await proxy.chat("r1", {"role": "user", "content": "at 10:04: hi"})
    steps = [step["step_id"] for step in await proxy.steps("r1")]
    (member,) = await opened(proxy, steps[0], 1, ignore=["at *: "])
    await proxy.chat(member, {"role": "user", "content": "at 11:17: hi"})

    assert (await stored_rollout(store, member)).has_branched


async def test_rollouts_and_groups_that_are_opened_with_a_playback_are_branches(proxy):
    steps = await proxy.turns("r1", 2)
    terms = {"playback": {"of": "r1", "before": steps[1]}}
    await proxy.open("p1", **terms)
    (member,) = await proxy.open_group("g", rollout=terms)
    await proxy.open("p2", playback={"of": "r1"})

    assert {("p1", None, steps[1]), (member, "g", steps[1]), ("p2", None, None)} == {
        (branch["rollout_id"], branch["group_id"], branch.get("before"))
        for branch in (await proxy.get(PATH)).json["branches"]
    }


async def test_the_branches_of_a_source_that_is_deleted_stay(proxy):
    """Its values are gone with it."""
    steps = await proxy.turns("r1", 2)
    (member,) = await opened(proxy, steps[1], 1)
    await proxy.turns(member, 2)
    await proxy.delete("/rollouts/r1")

    assert (await proxy.get("/rollouts/r1/values")).status == 404
    assert len(await proxy.steps(member)) == 2
