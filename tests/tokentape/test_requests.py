"""Each route of the control API through either client, before a real proxy."""

from math import inf, nan
from typing import get_type_hints

import pytest
from aiohttp import web

from tokentape import ClientError
from tokentape.requests import open_group, open_rollout, query_from
from tokentape.types import Choice, OpenedRollout, Rollout, Step

HOSTILE = ["a/b", "a%2Fb?c#d", "🦊 x", '{"}\\']


async def test_a_rollout_is_opened_looked_at_rewarded_and_finished(client, agent):
    """Open, call, look, patch, finish: each answers with the rollout as it stands then."""
    opened = await client.open_rollout("r1", group_id="g1", metadata={"task": "sum"}, limits={"max_steps": 5})
    (step_id,) = await agent.talk(opened, "hi")
    looked = await client.rollout("r1")
    patched = await client.patch_rollout("r1", reward=0.5, step_rewards={step_id: 1.0})
    finished = await client.finish_rollout("r1", "failed", metadata={"why": "late"})

    assert ("open", {"task": "sum"}, "g1") == (opened["status"], opened["metadata"], opened["group_id"])
    assert (1, 1) == (looked["counts"]["steps"], looked["counts"]["exact"])
    assert (0.5, {step_id: 1.0}) == (patched["reward"], patched["step_rewards"])
    assert ("failed", {"why": "late"}, 0.5) == (finished["status"], finished["metadata"], finished["reward"])


async def test_the_same_opening_gives_the_same_answer(client):
    """So that an ask whose answer was lost can be asked again."""
    assert await client.open_rollout("r1", model="policy") == await client.open_rollout("r1", model="policy")


async def test_an_opening_without_an_id_makes_one(client):
    """Each its own."""
    one, two = await client.open_rollout(), await client.open_rollout()

    assert one["rollout_id"] != two["rollout_id"]


@pytest.mark.parametrize("name", HOSTILE)
async def test_any_id_may_stand_in_a_path(client, agent, name):
    """Slashes, dots, query signs, emoji: they reach the rollout that they name."""
    opened = await client.open_rollout(name)
    (step_id,) = await agent.talk(opened, "hi")

    assert name == (await client.rollout(name))["rollout_id"]
    assert step_id == (await client.step(name, step_id))["step_id"]


async def test_an_id_of_dots_is_no_folder(client):
    """`..` is a rollout like another."""
    await client.open_rollout("..")

    assert ".." == (await client.rollout(".."))["rollout_id"]


async def test_listings_are_asked_for_page_by_page(client):
    """All rollouts, newest first, whatever the size of a page; filters are the route's."""
    names = [f"r{number}" for number in range(5)]
    for name in names:
        await client.open_rollout(name, group_id="odd" if name in ("r1", "r3") else None)
    await client.finish_rollout("r3")

    assert sorted(names) == sorted(each["rollout_id"] for each in await client.rollouts(page=2))
    assert ["r1", "r3"] == sorted(each["rollout_id"] for each in await client.rollouts(group_id="odd", page=1))
    assert ["r3"] == [each["rollout_id"] for each in await client.rollouts(status="completed")]
    assert [] == await client.rollouts(since=4_000_000_000)


async def test_steps_are_asked_for_page_by_page(client, agent):
    """All steps in the order of storing, none twice; also when the last page is full."""
    opened = await client.open_rollout("r1")
    told = await agent.talk(opened, "one", "two", "three", "four")

    assert told == [step["step_id"] for step in await client.steps("r1", page=2)]
    assert told == [step["step_id"] for step in await client.steps("r1", page=3)]


async def test_the_tree_of_a_rollout(client, agent):
    """Two turns are two nodes, one below the other."""
    steps = await agent.talk(await client.open_rollout("r1"), "one", "two")

    nodes = (await client.tree("r1"))["nodes"]

    assert [(steps[0], None), (steps[1], 0)] == [(node["step_id"], node["parent"]) for node in nodes]


async def test_exports_are_rows(client, agent):
    """Of one rollout and of many, one dict a row; options are the route's."""
    for name in ("r1", "r2"):
        await agent.talk(await client.open_rollout(name), "one", "two")
    await client.finish_rollout("r2")
    rows = await client.export_rollout("r1")
    steps = await client.export_rollout("r1", "steps")

    assert (1, 2) == (len(rows), len(steps))
    assert len(rows[0]["token_ids"]) == len(rows[0]["mask"])
    assert {"r1", "r2"} == {row["rollout_id"] for row in await client.export()}
    assert ["r2"] == [row["rollout_id"] for row in await client.export(status="completed", max_len=10_000)]


async def test_a_deleted_rollout_is_gone(client):
    """And deleting it again is no error."""
    await client.open_rollout("r1")
    await client.delete_rollout("r1")
    await client.delete_rollout("r1")

    with pytest.raises(ClientError) as caught:
        await client.rollout("r1")
    assert 404 == caught.value.status


async def test_answers_have_the_shapes_that_are_typed(client, agent):
    """Each field that a type names is there, and no answer has one that its type does not name."""
    opened = await client.open_rollout("r1")
    await agent.talk(opened, "hi")
    (step,) = await client.steps("r1")

    assert get_type_hints(OpenedRollout).keys() == opened.keys()
    assert get_type_hints(Rollout).keys() == (await client.rollout("r1")).keys()
    assert Step.__required_keys__ == step.keys()
    assert get_type_hints(Choice).keys() == step["choices"][0].keys()


@pytest.fixture
def heard(engine):
    """What a server that says {} to everything was asked: method, path with query, body."""
    asked = []

    async def answering(request, body):
        asked.append((request.method, request.raw_path, None if body == {"raw": b""} else body))
        return web.json_response({"groups": [], "cursor": None})

    engine.answering = answering
    return asked


GROUPS = [
    (("open_group", 4), {"group_id": "g/1", "rollout": {"model": "m"}, "metadata": {"a": 1}}, "POST", "/groups",
     {"group_id": "g/1", "size": 4, "rollout": {"model": "m"}, "metadata": {"a": 1}}),
    (("group", "g/1"), {}, "GET", "/groups/g%2F1", None),
    (("groups",), {"status": "complete"}, "GET", "/groups?status=complete&limit=100", None),
    (("delete_group", "g/1"), {}, "DELETE", "/groups/g%2F1", None),
    (("export_group", "g/1", "trl"), {"report": False}, "GET", "/groups/g%2F1/export?format=trl&report=false", None),
    (("claim_batch",), {"consumer": "c", "groups": 2, "wait_s": 0.5}, "POST", "/batches/claim",
     {"consumer": "c", "groups": 2, "wait_s": 0.5}),
    (("ack_batch", "b"), {"delete": True}, "POST", "/batches/b/ack", {"delete": True}),
    (("ack_batch", "b"), {}, "POST", "/batches/b/ack", {}),
    (("release_batch", "b"), {}, "POST", "/batches/b/release", {}),
    (("extend_batch", "b"), {"lease_s": 30}, "POST", "/batches/b/extend", {"lease_s": 30}),
    (("policy",), {}, "GET", "/policy", None),
    (("put_policy", "v7"), {}, "PUT", "/policy", {"version": "v7"}),
    (("pause",), {}, "POST", "/policy/pause", {"mode": "wait"}),
    (("pause", "reject"), {"drain_s": 2.5}, "POST", "/policy/pause?drain_s=2.5", {"mode": "reject"}),
    (("resume",), {}, "POST", "/policy/resume", None),
]  # fmt: skip


@pytest.mark.parametrize(("call", "named", "method", "path", "body"), GROUPS, ids=lambda value: str(value)[:40])
async def test_groups_batches_and_policy_are_asked_at_their_routes(
    client_at, engine, heard, call, named, method, path, body
):
    """What is said and nothing else: no nulls."""
    client = client_at(engine.url)
    await getattr(client, call[0])(*call[1:], **named)
    await client.close()

    assert [(method, path, body)] == heard


def test_an_opening_names_what_it_opens_before_it_asks():
    """So that to ask again after a lost answer opens nothing twice."""
    assert open_rollout(None, {}).body["rollout_id"]
    assert open_group(None, {}).body["group_id"]


def test_a_query_says_true_as_the_route_reads_it():
    """Booleans in small letters; what is None is not said."""
    assert {"report": "true", "limit": "3"} == query_from(report=True, limit=3, status=None)


@pytest.mark.parametrize("number", [nan, inf, -inf, 1e39, 10**400])
async def test_a_reward_that_is_no_float32_is_not_sent(client, agent, number):
    """JSON would say null, which removes a reward; the error names the field, and the proxy is not called."""
    opened = await client.open_rollout("r1")
    (step_id,) = await agent.talk(opened, "hi")
    await client.patch_rollout("r1", reward=0.5)
    changes = [
        {"reward": number},
        {"step_rewards": {step_id: number}},
        {"step_rewards": {step_id: [number]}},
        {"advantages": number},
        {"advantages": [1.0, number]},
        {"advantages": {step_id: (number,)}},
    ]
    for change in changes:
        with pytest.raises(ClientError, match="finite") as refused:
            await client.patch_rollout("r1", **change)
        assert (None, [*change]) == (refused.value.status, [refused.value.param])
    with pytest.raises(ClientError, match="finite"):
        await client.finish_rollout("r1", reward=number)

    assert ("open", 0.5) == ((rollout := await client.rollout("r1"))["status"], rollout["reward"])
