"""Each route of the control API through either client, before a real proxy."""

from math import inf, nan, nextafter
from typing import get_type_hints

import httpx2
import pytest
from aiohttp import web

from tokentape import AsyncClient, ClientError
from tokentape.control_api import MAX_FLOAT32, NOT_VALID
from tokentape.types import Choice, OpenedRollout, Rollout, Step

SPECIAL_IDS = ["a/b", "a%2Fb?c#d", "🦊 x", '{"}\\']


async def test_opening_reading_patching_and_finishing_return_the_rollout(client, agent):
    """Each with its state at that time."""
    opened = await client.open_rollout("r1", group_id="g1", metadata={"task": "sum"}, limits={"max_steps": 5})
    (step_id,) = await agent.send_turns(opened, "hi")
    read = await client.rollout("r1")
    patched = await client.patch_rollout("r1", reward=0.5, step_rewards={step_id: 1.0})
    finished = await client.finish_rollout("r1", "failed", metadata={"why": "late"})

    assert (opened["status"], opened["metadata"], opened["group_id"]) == ("open", {"task": "sum"}, "g1")
    assert (read["counts"]["steps"], read["counts"]["exact"]) == (1, 1)
    assert (patched["reward"], patched["step_rewards"]) == (0.5, {step_id: 1.0})
    assert (finished["status"], finished["metadata"], finished["reward"]) == ("failed", {"why": "late"}, 0.5)


async def test_the_continuation_mode_is_set_when_a_rollout_is_opened_and_changed_later(client):
    """By `open_rollout`, `open_group` and `patch_rollout`; False is `off`."""
    opened = await client.open_rollout("r1", continuation="append")
    patched = await client.patch_rollout("r1", continuation=False)
    group = await client.open_group(2, rollout={"continuation": "faithful"})

    assert (opened["continuation"], patched["continuation"]) == ("append", "off")
    assert [rollout["continuation"] for rollout in group["rollouts"]] == ["faithful", "faithful"]


async def test_branches_repeat_a_rollout_up_to_a_step_and_give_it_a_value(client, agent):
    """The agent runs from its start in each of them."""
    steps = await agent.send_turns(await client.open_rollout("r1"), "hi", "there")
    group = await client.branches("r1", steps[1], 2, group_id="g", metadata={"x": 1})
    for opened, reward in zip(group["rollouts"], (1, 0.5), strict=True):
        assert steps[0] == (await agent.send_turns(opened, "hi", "there"))[0]
        await client.finish_rollout(opened["rollout_id"], reward=reward)
    (value,) = await client.values("r1")

    assert (group["group_id"], group["size"], group["metadata"]) == ("g", 2, {"x": 1})
    assert (steps[1], 0.75, 2) == (value["step_id"], value["value"], value["count"])
    assert await client.values("r1", any_version=True) == [value]


async def test_a_rollout_with_a_playback_repeats_another_one(client, agent):
    steps = await agent.send_turns(await client.open_rollout("r1"), "hi")
    opened = await client.open_rollout("p1", playback={"of": "r1"})

    assert steps == await agent.send_turns(opened, "hi")


async def test_opening_a_rollout_twice_returns_the_same_response(client):
    """A client can send a request again if its response was lost."""
    assert await client.open_rollout("r1", model="policy") == await client.open_rollout("r1", model="policy")


async def test_rollouts_without_an_id_get_different_ids(client):
    """The client makes them."""
    first, second = await client.open_rollout(), await client.open_rollout()

    assert first["rollout_id"] != second["rollout_id"]


@pytest.mark.parametrize("name", SPECIAL_IDS)
async def test_any_id_can_be_part_of_a_path(client, agent, name):
    """Slashes, percent signs, query signs, emoji: the request reaches the rollout."""
    opened = await client.open_rollout(name)
    (step_id,) = await agent.send_turns(opened, "hi")

    assert name == (await client.rollout(name))["rollout_id"]
    assert step_id == (await client.step(name, step_id))["step_id"]


async def test_an_id_of_dots_is_not_a_parent_folder(client):
    """`..` is a valid rollout id."""
    await client.open_rollout("..")

    assert (await client.rollout(".."))["rollout_id"] == ".."


async def test_rollouts_are_listed_page_by_page(client):
    """The client lists all rollouts, for any page size, and has the route's filters."""
    names = [f"r{number}" for number in range(5)]
    for name in names:
        await client.open_rollout(name, group_id="odd" if name in ("r1", "r3") else None)
    await client.finish_rollout("r3")

    assert sorted(names) == sorted(rollout["rollout_id"] for rollout in await client.rollouts(page=2))
    assert sorted(rollout["rollout_id"] for rollout in await client.rollouts(group_id="odd", page=1)) == ["r1", "r3"]
    assert [rollout["rollout_id"] for rollout in await client.rollouts(status="completed")] == ["r3"]
    assert await client.rollouts(since=4_000_000_000) == []


async def test_any_route_can_be_requested(client):
    """One without a method of its own, for example."""
    assert await client.send("GET", "/rollouts", limit=5, status=None) == {"rollouts": [], "cursor": None}


async def test_steps_are_listed_page_by_page(client, agent):
    """All steps once, in the order in which they were stored; also if the last page is full."""
    opened = await client.open_rollout("r1")
    sent = await agent.send_turns(opened, "one", "two", "three", "four")

    assert sent == [step["step_id"] for step in await client.steps("r1", page=2)]
    assert sent == [step["step_id"] for step in await client.steps("r1", page=3)]
    assert sent[2:] == [step["step_id"] for step in await client.steps("r1", after=1)]


async def test_two_turns_are_two_nodes_of_the_tree(client, agent):
    """The second is the child of the first."""
    steps = await agent.send_turns(await client.open_rollout("r1"), "one", "two")

    nodes = (await client.tree("r1"))["nodes"]

    assert nodes == (await client.tree("r1", texts=False))["nodes"]
    assert [(steps[0], None), (steps[1], 0)] == [(node["step_id"], node["parent"]) for node in nodes]


async def test_exports_of_one_and_of_many_rollouts_are_rows(client, agent):
    """A dict per row; options are the query parameters of the route."""
    for name in ("r1", "r2"):
        await agent.send_turns(await client.open_rollout(name), "one", "two")
    await client.finish_rollout("r2")
    rows = await client.export_rollout("r1")
    steps = await client.export_rollout("r1", "steps")

    assert (len(rows), len(steps)) == (1, 2)
    assert len(rows[0]["token_ids"]) == len(rows[0]["mask"])
    assert {row["rollout_id"] for row in await client.export()} == {"r1", "r2"}
    assert [row["rollout_id"] for row in await client.export(status="completed", max_len=10_000)] == ["r2"]
    assert len(await client.export_rollout("r1", policy="default")) == 1
    with pytest.raises(ClientError, match="Policy 'planner' not found"):
        await client.export(policy="planner")


async def test_a_deleted_rollout_is_not_found(client):
    """Deleting it again is no error."""
    await client.open_rollout("r1")
    await client.delete_rollout("r1")
    await client.delete_rollout("r1")

    with pytest.raises(ClientError) as caught:
        await client.rollout("r1")
    assert caught.value.status == 404


async def test_responses_have_exactly_the_fields_of_their_types(client, agent):
    """No field is missing, and none is untyped. `continuation`, `thread_rewards` and `warning` can be absent."""
    opened = await client.open_rollout("r1")
    await agent.send_turns(opened, "hi")
    (step,) = await client.steps("r1")
    other = await client.open_rollout("r2", continuation="append")
    await agent.send_turns(other, "hi")
    await client.patch_rollout("r2", thread_rewards={"main": 1})

    assert OpenedRollout.__required_keys__ == opened.keys()
    assert Rollout.__required_keys__ == (await client.rollout("r1")).keys()
    assert get_type_hints(OpenedRollout).keys() == other.keys()
    assert get_type_hints(Rollout).keys() - {"warning"} == (await client.rollout("r2")).keys()
    assert Step.__required_keys__ == step.keys()
    assert get_type_hints(Choice).keys() == step["choices"][0].keys()


@pytest.fixture
def received(engine):
    """The requests that a server receives: method, path with query, body."""
    requests = []

    async def respond(request, body):
        requests.append((request.method, request.raw_path, None if body == {"raw": b""} else body))
        return web.json_response({"groups": [], "cursor": None})

    engine.respond = respond
    return requests


GROUPS = [
    (("open_group", 4), {"group_id": "g/1", "rollout": {"model": "m"}, "metadata": {"a": 1}}, "POST", "/groups",
     {"group_id": "g/1", "size": 4, "rollout": {"model": "m"}, "metadata": {"a": 1}}),
    (("open_group", 4), {"group_id": "g", "deadline_s": 60, "idle_s": 9.5}, "POST", "/groups",
     {"group_id": "g", "size": 4, "deadline_s": 60, "idle_s": 9.5}),
    (("open_group", 4), {"group_id": "g", "start_s": 60}, "POST", "/groups", {"group_id": "g", "size": 4, "start_s": 60}),
    (("branches", "r/1", "s1", 4), {"group_id": "g", "presets": ["codex"]}, "POST", "/rollouts/r%2F1/branches",
     {"group_id": "g", "before": "s1", "count": 4, "presets": ["codex"]}),
    (("branches", "r", None, 4), {"group_id": "g"}, "POST", "/rollouts/r/branches", {"group_id": "g", "count": 4}),
    (("requeue_group", "g/1"), {"max_staleness": 3, "policy": "p"}, "POST", "/groups/g%2F1/requeue",
     {"max_staleness": 3, "policy": "p"}),
    (("requeue_group", "g"), {}, "POST", "/groups/g/requeue", {}),
    (("group", "g/1"), {}, "GET", "/groups/g%2F1", None),
    (("groups",), {"status": "complete"}, "GET", "/groups?status=complete&limit=100", None),
    (("delete_group", "g/1"), {}, "DELETE", "/groups/g%2F1", None),
    (("export_group", "g/1", "trl"), {"report": False}, "GET", "/groups/g%2F1/export?format=trl&report=false", None),
    (("claim_batch",), {"consumer": "c", "groups": 2, "wait_s": 0.5, "instance": "i"}, "POST", "/batches/claim",
     {"consumer": "c", "groups": 2, "wait_s": 0.5, "instance": "i"}),
    (("ack_batch", "b"), {"delete": True}, "POST", "/batches/b/ack", {"delete": True}),
    (("ack_batch", "b"), {}, "POST", "/batches/b/ack", {}),
    (("release_batch", "b"), {}, "POST", "/batches/b/release", {}),
    (("extend_batch", "b"), {"lease_s": 30}, "POST", "/batches/b/extend", {"lease_s": 30}),
    (("policy",), {}, "GET", "/policy", None),
    (("put_policy", "v7"), {}, "PUT", "/policy", {"version": "v7"}),
    (("pause",), {}, "POST", "/policy/pause", {"mode": "wait"}),
    (("pause", "reject"), {"drain_s": 2.5}, "POST", "/policy/pause?drain_s=2.5", {"mode": "reject"}),
    (("pause",), {"in_flight": "abort"}, "POST", "/policy/pause", {"mode": "wait", "in_flight": "abort"}),
    (("load_adapter", "policy", "/adapters/7", 7), {"drain_s": 5, "in_flight": "abort"}, "POST", "/policy/adapter",
     {"name": "policy", "path": "/adapters/7", "version": 7, "drain_s": 5, "mode": "wait", "in_flight": "abort"}),
    (("resume",), {}, "POST", "/policy/resume", None),
    (("policies",), {}, "GET", "/policies", None),
    (("policy", "p/1"), {}, "GET", "/policies/p%2F1", None),
    (("policy", ".."), {}, "GET", "/policies/%2E%2E", None),
    (("put_policy", 7), {"policy": "planner"}, "PUT", "/policies/planner", {"version": 7}),
    (("put_policy", 7), {"run": "a"}, "PUT", "/policy", {"version": 7, "run": "a"}),
    (("put_policy", 7), {"new_epoch": True}, "PUT", "/policy", {"version": 7, "new_epoch": True}),
    (("pause",), {"policy": "planner", "drain_s": 2.5}, "POST", "/policies/planner/pause?drain_s=2.5", {"mode": "wait"}),
    (("load_adapter", None, "/adapters/7", 7), {"policy": "planner"}, "POST", "/policies/planner/adapter",
     {"path": "/adapters/7", "version": 7, "drain_s": 60.0, "mode": "wait", "in_flight": "drain"}),
    (("resume",), {"policy": "a b"}, "POST", "/policies/a%20b/resume", None),
]  # fmt: skip


@pytest.mark.parametrize(("call", "options", "method", "path", "body"), GROUPS, ids=lambda value: str(value)[:40])
async def test_groups_batches_and_policy_have_their_routes(
    client_at, engine, received, call, options, method, path, body
):
    """The body has the arguments and no nulls."""
    client = client_at(engine.url)
    await getattr(client, call[0])(*call[1:], **options)
    await client.close()

    assert received == [(method, path, body)]


async def test_the_claims_of_a_client_have_its_instance(client_at, engine, received):
    """The instance is made when the client is created, so that one that was started again has another."""
    clients = [client_at(engine.url) for _ in range(2)]
    for client in (*clients, *clients):
        await client.claim_batch(consumer="c", groups=1)
    for client in clients:
        await client.close()
    instances = [body["instance"] for _, _, body in received]

    assert instances[:2] == instances[2:]
    assert len(set(instances)) == 2


@pytest.mark.parametrize(("call", "name"), [(("open_rollout",), "rollout_id"), (("open_group", 2), "group_id")])
async def test_a_repeated_request_to_open_has_the_id_of_the_first(client_at, engine, call, name):
    """It is made once, so that a response that was lost opens nothing twice."""
    bodies = []

    async def respond(request, body):
        bodies.append(body)
        return web.json_response({}, status=503 if len(bodies) == 1 else 200, headers={"Retry-After": "0"})

    engine.respond = respond
    client = client_at(engine.url)
    await getattr(client, call[0])(*call[1:])
    await client.close()

    assert bodies[0][name]
    assert bodies[0] == bodies[1]


async def test_booleans_of_a_query_are_lower_case(client_at, engine, received):
    """Options that are None are omitted."""
    client = client_at(engine.url)
    await client.export(report=True, limit=3, status=None)
    await client.close()

    assert received[0][1] == "/export?format=sequences&report=true&limit=3"


@pytest.mark.parametrize("number", [nan, inf, -inf, 1e39, 10**400])
async def test_a_reward_beyond_float32_is_not_sent(client, agent, number):
    """NaN would be null in JSON, which removes a reward. The error names the field."""
    opened = await client.open_rollout("r1")
    (step_id,) = await agent.send_turns(opened, "hi")
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
        assert (refused.value.status, [refused.value.param]) == (None, [*change])
    with pytest.raises(ClientError, match="finite"):
        await client.finish_rollout("r1", reward=number)

    assert ((rollout := await client.rollout("r1"))["status"], rollout["reward"]) == ("open", 0.5)


async def test_the_proxy_has_the_same_range_of_rewards(url):
    """It accepts the largest float32, and returns the code of the client's error for the next number."""
    async with AsyncClient(url) as client, httpx2.AsyncClient(base_url=url) as http:
        await client.open_rollout("r1")
        patched = await client.patch_rollout("r1", reward=MAX_FLOAT32)
        response = await http.patch("/rollouts/r1", json={"reward": nextafter(MAX_FLOAT32, inf)})

    assert patched["reward"] == MAX_FLOAT32
    assert (response.status_code, response.json()["error"]["code"]) == (422, NOT_VALID)
