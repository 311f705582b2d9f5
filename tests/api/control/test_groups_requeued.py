"""Groups that are put into the queue again: dropped, stale and acknowledged ones, by several processes."""

import asyncio
from collections import Counter

import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session, names_in

from proxy.server.listener import running


async def done(proxy, name="g", **fields):
    """Record a group that is acknowledged; return its rollouts."""
    members = await proxy.group(name, 1, 0)
    batch = await proxy.claim(**fields)
    assert (await proxy.ack(batch)).status == 200
    return members


async def requeue(proxy, name="g", **body):
    return await proxy.post(f"/groups/{name}/requeue", body)


async def test_a_group_that_is_done_is_delivered_again_and_flagged(proxy):
    """With the rewards that were trained, which stay frozen; `acked` is how often it was acknowledged before."""
    members = await done(proxy)
    seen = []
    for _ in range(2):
        response = await requeue(proxy)
        batch = await proxy.claim()
        frozen = await proxy.patch(f"/rollouts/{members[0]}", {"reward": 5})
        await proxy.ack(batch)
        (group,) = batch["groups"]
        seen.append(
            (
                response.status,
                response.json["status"],
                frozen.status,
                group["rewards"],
                group["requeued"],
                group["acked"],
            )
        )
    shown = (await proxy.get("/groups/g")).json
    metrics = (await proxy.get("/metrics")).text.decode()

    assert [(200, "complete", 409, [1.0, 0.0], count, count) for count in (1, 2)] == seen
    assert tuple(shown[name] for name in ("status", "requeued", "acked")) == ("done", 2, 2)
    assert 'tokentape_group_events_total{event="requeued",policy="default"} 2.0' in metrics


async def test_a_group_that_was_never_requeued_has_no_flag(proxy):
    await proxy.group("g", 1, 0)
    group = (await proxy.claim())["groups"][0]

    assert not {"requeued", "acked"} & {*group, *(await proxy.get("/groups/g")).json}


async def test_a_dropped_group_is_claimed_after_a_requeue(proxy):
    """It was never acknowledged; its reason is gone. Without its rewards, claims wait for them again."""
    members = await proxy.group("g", None, None)
    assert (await proxy.claim(format="slime", reward_s=0))["reasons"]["dropped"] == {"no_reward": 1}
    requeued = (await requeue(proxy)).json
    pending = await proxy.claim(format="slime")
    for member in members:
        await proxy.patch(f"/rollouts/{member}", {"reward": 1})
    (group,) = (await proxy.claim(format="slime"))["groups"]

    assert tuple(requeued[name] for name in ("status", "requeued", "acked")) == ("complete", 1, 0)
    assert not {"why", "code"} & requeued.keys()
    assert pending["reasons"]["refused"] == {"reward_pending": 1}
    assert (group["rollouts"], group["requeued"], group["acked"]) == (members, 1, 0)


async def test_a_stale_group_is_claimed_with_the_max_staleness_of_its_requeue(proxy):
    """Of that delivery only; a claim without a limit has none."""
    await proxy.put("/policy", {"version": 1})
    await proxy.group("g", 1, 0)
    await proxy.put("/policy", {"version": 6})
    stale = [await proxy.claim(max_staleness=1)]
    for limit in (None, 4):
        assert (await requeue(proxy, max_staleness=limit)).status == 200
        stale.append(await proxy.claim(max_staleness=1))
    await requeue(proxy, max_staleness=5)
    claimed = await proxy.claim(max_staleness=1)

    assert [claim["reasons"]["dropped"] for claim in stale] == [{"stale": 1}] * 3
    assert "5 policy versions behind; max_staleness is 4" in stale[2]["dropped"][0]["why"]
    assert names_in(claimed) == ["g"]


async def test_a_group_in_the_queue_is_unchanged(proxy):
    """Also after a repeated request; another `max_staleness` is 409, since its entry has the first one."""
    await proxy.group("g", 1, 0)
    first, limited = await requeue(proxy), await requeue(proxy, max_staleness=3)
    await proxy.ack(await proxy.claim())
    again = [await requeue(proxy, max_staleness=3) for _ in range(3)]
    other = await requeue(proxy, max_staleness=4)

    assert (first.status, "requeued" in first.json, limited.status) == (200, False, 409)
    assert [(response.status, response.json["requeued"]) for response in again] == [(200, 1)] * 3
    assert (other.status, other.json["error"]["param"]) == (409, "max_staleness")
    assert len((await proxy.claim(groups=9))["groups"]) == 1


async def test_a_group_that_is_open_or_claimed_is_409_and_an_unknown_one_404(proxy):
    await proxy.group("open", 1, finish=False)
    await proxy.group("g", 1, 0)
    batch = await proxy.claim()
    responses = [await requeue(proxy, name) for name in ("open", "g", "unknown")]
    await proxy.release(batch)

    assert [response.status for response in responses] == [409, 409, 404]
    assert "is open" in responses[0].json["error"]["message"]
    assert f"claimed by 'trainer' in batch '{batch['batch_id']}'" in responses[1].json["error"]["message"]
    assert (await requeue(proxy)).status == 200


@pytest.mark.parametrize(
    "body", [{"max_staleness": -1}, {"max_staleness": "1"}, {"policy": 1}, {"max": 1}, {"max_staleness": 1.5}]
)
async def test_an_invalid_body_is_422_and_requeues_nothing(proxy, body):
    await done(proxy)

    assert (await requeue(proxy, **body)).status == 422
    assert await proxy.status("g") == "done"


async def test_concurrent_requeues_by_several_processes_queue_a_group_once(proxy, store, http):
    """All of them get 200, and one claim gets it."""
    await done(proxy)
    async with running(settings_for(None), store) as second, running(settings_for(None), store) as third:
        clients = [proxy, Session(http, second.url), Session(http, third.url)]
        responses = await asyncio.gather(*(requeue(client) for client in clients * 4))
        claims = await asyncio.gather(*(client.claim(groups=9) for client in clients))

    assert {(response.status, response.json["requeued"]) for response in responses} == {(200, 1)}
    assert sum(len(claimed["groups"]) for claimed in claims) == 1


async def test_requeues_claims_and_acknowledgements_at_the_same_time_deliver_each_requeue_once(proxy, store, http):
    """Each delivery beyond the first is one requeue that was counted, however they are interleaved."""
    await proxy.group("g", 1, 0)
    async with running(settings_for(None), store) as served:
        clients, statuses, delivered = [proxy, Session(http, served.url)], Counter(), []

        async def train(client):
            for _ in range(8):
                batch = await client.claim()
                if batch["groups"]:
                    delivered.append(batch["groups"][0].get("requeued", 0))
                    await client.ack(batch)

        async def put_back(client):
            for _ in range(8):
                statuses[(await requeue(client)).status] += 1

        await asyncio.gather(*(work(client) for client in clients for work in (train, put_back)))
        shown = (await proxy.get("/groups/g")).json

    assert {200, 409} >= statuses.keys()
    assert list(range(len(delivered))) == sorted(delivered)
    assert len(delivered) - 1 == shown.get("requeued", 0) - (shown["status"] == "complete")


async def test_a_group_is_requeued_for_one_of_several_policies(store, http):
    """The others keep their state. A policy without steps in the group is 409."""
    policies = {"planner": {"models": ["p"]}, "coder": {"models": ["c"]}, "idle": {"models": ["i"]}}
    async with running(settings_for(None, policies=policies), store) as served:
        proxy = Session(http, served.url)
        fields = {"status": b'"done"', "size": b"1", "members": b"[]", "complete_ms": b"1"}
        states = {f"status:{policy}": b'"done"' for policy in ("planner", "coder")}
        await store.groups.open("g", {**fields, **states}, now_ms=1)
        missing, unknown = await requeue(proxy), await requeue(proxy, policy="nobody")
        empty = await requeue(proxy, policy="idle")
        response = await requeue(proxy, policy="planner")

    assert [missing.status, unknown.status, empty.status] == [422, 404, 409]
    shown = response.json["policies"]
    assert (
        shown["planner"]["status"],
        shown["planner"]["requeued"],
        shown["coder"]["status"],
    ) == ("complete", 1, "done")
    assert "requeued" not in shown["coder"]


async def test_a_group_that_is_deleted_meanwhile_is_404(proxy, store, monkeypatch):
    await done(proxy)
    enqueue = store.queue.enqueue

    async def deleted_before(group, *arguments, **named):
        await store.groups.delete(group)
        return await enqueue(group, *arguments, **named)

    monkeypatch.setattr(store.queue, "enqueue", deleted_before)

    assert (await requeue(proxy)).status == 404
