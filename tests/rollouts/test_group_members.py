"""Membership of groups."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.support.fakes import FailingStore

from proxy.clock import SystemClock
from proxy.errors import Conflict
from proxy.rollouts.group import find_group, join, mark_finished, read_group

CLOCK = SystemClock()


async def opened(store, name="r1"):
    return await store.open(name, {}, now_ms=1)


async def test_joining_creates_the_group_and_is_idempotent(store):
    rollouts = [await opened(store, name) for name in ("r2", "r1", "r2")]
    await asyncio.gather(*(join(store, CLOCK, rollout, "g") for rollout in rollouts))

    assert ("r1", "r2") == (await find_group(store, "g")).members


async def test_only_its_own_rollouts_can_join_an_opened_group(store):
    """A rollout that was created for the join is deleted; an existing one remains."""
    name = next(name for name in (f"m{n}" for n in range(1000)) if store.same_slot("g", name))
    await store.open_group("g", {"size": b"1", "members": b'["%s"]' % name.encode()}, {name: {}}, now_ms=1)
    existing = await opened(store, "existing")

    await join(store, CLOCK, await opened(store, name), "g")
    for rollout in (await opened(store, "new"), await opened(store, existing.name)):
        with pytest.raises(Conflict, match="not one of them"):
            await join(store, CLOCK, rollout, "g")

    assert await store.get("new") is None
    assert await store.get("existing") is not None
    assert (name,) == (await find_group(store, "g")).members


async def test_a_group_that_is_deleted_during_a_join_is_created_again(store):
    groups = FailingStore(store.groups)
    groups.waiting["mark"] = asyncio.Event()
    task = asyncio.ensure_future(join(SimpleNamespace(groups=groups), CLOCK, await opened(store), "g"))
    groups.reached["mark"] = asyncio.Event()
    await groups.reached["mark"].wait()
    await store.groups.delete("g")
    groups.waiting.pop("mark").set()
    await task

    assert ("r1",) == (await find_group(store, "g")).members


async def test_finished_members_are_marked_in_this_incarnation_of_the_group(store):
    await join(store, CLOCK, await opened(store), "g")
    group = await find_group(store, "g")
    await mark_finished(store, CLOCK, group, ["r1"])

    assert {"r1"} == (await find_group(store, "g")).finished

    await store.groups.delete("g")
    await store.groups.open("g", {}, now_ms=1)
    await mark_finished(store, CLOCK, group, ["r1"])

    assert frozenset() == (await find_group(store, "g")).finished
    assert read_group(await store.groups.get("g")).members == ()
