"""Completion of groups of several policies: one entry for each that is trained and has steps in the group."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from tests.support.fakes import settings_for
from tests.support.forests import make_step
from tests.support.playbacks import inherit, record
from tests.support.policies import policies_of

from proxy.clock import SystemClock
from proxy.rollouts.finishing import Finisher
from proxy.rollouts.group import find_group
from proxy.rollouts.playback import Tapes
from proxy.server.listener import running
from proxy.telemetry.metrics import make_metrics
from storage.errors import StoreUnreachable
from storage.types import StepWrite

POLICIES = {
    "planner": {"models": ["planner"]},
    "coder": {"models": ["coder"]},
    "judge": {"models": ["judge"], "train": False},
}


@pytest.fixture
def sections():
    return {"policies": POLICIES}


async def opened(proxy, name, *members):
    """Open a group and make calls to these models in each member; return the members."""
    rollouts = (await proxy.post("/groups", {"group_id": name, "size": len(members)})).json["rollouts"]
    names = [rollout["rollout_id"] for rollout in rollouts]
    for rollout, models in zip(names, members, strict=True):
        for model in models:
            await proxy.chat(rollout, model=model)
    return names


async def queued(store):
    """Return the groups of each queue."""
    names = ("default", "planner", "coder", "judge")
    return {
        name: [entry.group for entry in found]
        for name in names
        if (found := (await store.queue.read(name, limit=99)).groups)
    }


@pytest.mark.parametrize(
    ("members", "queues"),
    [
        ([["planner", "judge"], ["coder"]], ["coder", "planner"]),
        ([["planner"], ["other", "judge"]], ["planner"]),
        ([["judge"], []], ["coder", "planner"]),
    ],
)
async def test_a_group_is_in_the_queue_of_each_trained_policy_with_steps(proxy, store, members, queues):
    """If there is none, in the queues of all of them, so that a consumer learns of it."""
    for name in await opened(proxy, "g", *members):
        await proxy.finish(name, reward=1)

    assert {key: ["g"] for key in queues} == await queued(store)
    assert queues == sorted((await proxy.get("/groups/g")).json["policies"])


async def test_if_no_policy_is_trained_the_group_is_complete_for_the_default_one(proxy, store):
    names = await opened(proxy, "g", ["planner"])
    policies = {name: {**policy, "train": False} for name, policy in POLICIES.items()}
    async with running(settings_for(None, policies=policies), store) as other:
        finished = await proxy.http.post(f"{other.url}/rollouts/{names[0]}/finish", json={"status": "completed"})
        finished.release()

    assert (finished.status, await queued(store), await proxy.status("g")) == (200, {"default": ["g"]}, "complete")


async def test_a_group_with_an_unreadable_step_is_in_the_queues_of_all_policies(proxy, store):
    """Its claims are refused with the reason."""
    (name,) = await opened(proxy, "g", ["planner"])
    stored = await store.get(name)
    await store.append(StepWrite(name, stored.incarnation, "broken", b"TT\x01 not a record"), now_ms=1)
    await proxy.finish(name, reward=1)
    claims = [await proxy.claim(policy=policy) for policy in ("planner", "coder")]

    assert await queued(store) == {"planner": ["g"], "coder": ["g"]}
    assert [[group["code"] for group in claimed["refused"]] for claimed in claims] == [["damaged_step"]] * 2


async def test_concurrent_completions_enqueue_a_group_once_in_each_queue(proxy, store):
    """Also after a claim has acknowledged it for one policy."""
    names = await opened(proxy, "g", ["planner", "coder"])
    await store.update_if(names[0], {"status": b'"completed"', "reward": b"1"}, expect={}, now_ms=1)
    group = await find_group(store, "g")
    completions = [
        Finisher(
            store, SystemClock(), make_metrics(CollectorRegistry()), None, Tapes(store), policies_of(POLICIES).trained
        )
        for _ in range(6)
    ]
    await asyncio.gather(*(completion.settle(group) for completion in completions))
    once = await queued(store)
    batch = await proxy.claim(policy="planner")
    await proxy.ack(batch)
    await asyncio.gather(*(completion.settle(group) for completion in completions))

    assert once == {"planner": ["g"], "coder": ["g"]}
    assert await queued(store) == {"coder": ["g"]}


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_completion_that_fails_leaves_all_queues_or_none(proxy, store, moment):
    """A retry of the finish completes the group."""
    names = await opened(proxy, "g", ["planner", "coder"])
    enqueue, queue = store.queue.enqueue, store.queue

    async def failing(*args, **named):
        if moment == "after":
            await enqueue(*args, **named)
        raise StoreUnreachable("the test took the store away")

    queue.enqueue = failing
    first = await proxy.finish(names[0], reward=1)
    between = await queued(store)
    queue.enqueue = enqueue
    second = await proxy.finish(names[0], reward=1)

    assert (
        [first.status, second.status], between
    ) == ([503, 200], {} if moment == "before" else {"planner": ["g"], "coder": ["g"]})  # fmt: skip
    assert await queued(store) == {"planner": ["g"], "coder": ["g"]}


async def test_a_group_is_not_queued_for_a_policy_with_inherited_steps_only(proxy, store):
    (name,) = await opened(proxy, "g", ["planner"])
    sampled = make_step("a", [1], [10], rollout_id="r0", policy="coder")
    await record(store, inherit(sampled, name))
    await proxy.finish(name, reward=1)

    assert await queued(store) == {"planner": ["g"]}
