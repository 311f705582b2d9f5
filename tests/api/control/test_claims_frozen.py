"""Rewards of a group that several policies claim: frozen as long as a batch of any of them relies on them."""

import asyncio
import contextlib

import aiohttp
import pytest
from tests.support.session import names_in

from proxy.api.control import claims
from storage.errors import StoreUnreachable

POLICIES = {"planner": {"models": ["planner"]}, "coder": {"models": ["coder"]}}


@pytest.fixture
def sections():
    return {"policies": POLICIES}


async def recorded(proxy, name="g"):
    """Record a group of one rollout with a step of each policy; return the rollout."""
    (rollout,) = (await proxy.post("/groups", {"group_id": name, "size": 1})).json["rollouts"]
    for model in POLICIES:
        await proxy.chat(rollout["rollout_id"], model=model)
    await proxy.finish(rollout["rollout_id"], reward=1)
    return rollout["rollout_id"]


async def change(proxy, member, reward):
    return (await proxy.patch(f"/rollouts/{member}", {"reward": reward})).status


@contextlib.contextmanager
def failing(monkeypatch, after=None):
    """Let claims fail after they have frozen the rewards, and after an event."""

    async def fail(*args, **named):
        if after is not None:
            after[0].set()
            await after[1].wait()
        raise StoreUnreachable("the test took the store away")

    with monkeypatch.context() as patched:
        patched.setattr(claims, "read_group_rows", fail)
        yield


async def test_a_failed_claim_of_one_policy_does_not_unfreeze_the_batch_of_another(proxy, monkeypatch):
    """Alone, its freeze is undone."""
    member = await recorded(proxy)
    with failing(monkeypatch):
        alone = await proxy.post("/batches/claim", {"consumer": "t", "policy": "coder"})
    undone = await change(proxy, member, 2)
    planner = await proxy.claim(policy="planner")
    with failing(monkeypatch):
        second = await proxy.post("/batches/claim", {"consumer": "t", "policy": "coder"})
    frozen = await change(proxy, member, 3)
    coder = await proxy.claim(policy="coder")

    assert [alone.status, undone, second.status, frozen] == [503, 200, 503, 409]
    assert [claimed["groups"][0]["rewards"] for claimed in (planner, coder)] == [[2.0]] * 2
    assert planner["batch_id"] == (await proxy.get(f"/rollouts/{member}")).json["claimed_by"]


async def test_a_claim_that_is_undone_after_another_policy_claimed_leaves_its_batch_frozen(proxy, monkeypatch):
    """The first claim froze the rewards before the second, and is undone after it was returned."""
    member = await recorded(proxy)
    started, proceed = asyncio.Event(), asyncio.Event()
    with failing(monkeypatch, (started, proceed)):
        first = asyncio.ensure_future(proxy.post("/batches/claim", {"consumer": "t", "policy": "planner"}))
        await started.wait()
    second = await proxy.claim(policy="coder")
    proceed.set()

    assert ((await first).status, names_in(second)) == (503, ["g"])
    assert await change(proxy, member, 5) == 409
    assert second["batch_id"] == (await proxy.get(f"/rollouts/{member}")).json["claimed_by"]


async def test_a_claim_that_lost_its_lease_and_its_failed_successor_leave_the_rewards_unfrozen(proxy, monkeypatch):
    """Neither of them is returned, in whichever order they are undone."""
    member = await recorded(proxy)
    events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
    tasks = []
    for lease_s, after in ((0.001, events[0]), (60, events[1])):
        body = {"consumer": "t", "policy": "planner", "lease_s": lease_s, "wait_s": 50}
        with failing(monkeypatch, after):
            tasks.append(asyncio.ensure_future(proxy.post("/batches/claim", body)))
            await after[0].wait()
    before = await change(proxy, member, 5)
    for (_, proceed), task in zip(reversed(events), reversed(tasks), strict=True):
        proceed.set()
        assert (await task).status == 503

    assert [before, await change(proxy, member, 6)] == [409, 200]
    assert names_in(await proxy.claim(policy="planner")) == ["g"]


async def test_a_group_that_is_claimed_and_released_again_and_again_has_a_bounded_number_of_claims(proxy, store):
    """The first batch is shown."""
    member = await recorded(proxy)
    batches = []
    for _ in range(5):
        for policy in POLICIES:
            batches.append(await proxy.claim(policy=policy))
            await proxy.release(batches[-1])
    stored = (await store.get(member)).fields["claimed_by"]

    assert batches[0]["batch_id"] == (await proxy.get(f"/rollouts/{member}")).json["claimed_by"]
    assert stored.count(b"planner") + stored.count(b"coder") == 4
    assert await change(proxy, member, 5) == 409


async def test_a_claim_that_is_cancelled_while_it_freezes_rewards_unfreezes_them(proxy, store, monkeypatch):
    """Its freeze ends before it is undone."""
    member = await recorded(proxy)
    started, proceed = asyncio.Event(), asyncio.Event()
    real = claims.freeze

    async def slow(*args):
        started.set()
        await proceed.wait()
        return await real(*args)

    async def cancelled(*args, **named):
        task = asyncio.ensure_future(render(*args, **named))
        await started.wait()
        task.cancel()
        asyncio.get_running_loop().call_soon(proceed.set)
        return await task

    render = claims._render
    with monkeypatch.context() as patched:
        patched.setattr(claims, "freeze", slow)
        patched.setattr(claims, "_render", cancelled)
        with contextlib.suppress(aiohttp.ClientError):
            await proxy.post("/batches/claim", {"consumer": "t", "policy": "planner"})

    assert await change(proxy, member, 5) == 200
    assert "claimed_by" not in (await store.get(member)).fields
