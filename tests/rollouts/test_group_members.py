"""Who belongs to a group."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes import FailingStore

from proxy.clock import SystemClock
from proxy.errors import Conflict
from proxy.rollouts.group import find_group, join, mark_finished, read_group

CLOCK = SystemClock()


async def opened(store, name="r1"):
    return await store.open(name, {}, now_ms=1)


async def test_a_group_comes_into_being_with_those_that_join_it(store):
    """Joining twice is joining once."""
    rollouts = [await opened(store, name) for name in ("r2", "r1", "r2")]
    await asyncio.gather(*(join(store, CLOCK, rollout, "g") for rollout in rollouts))

    assert ("r1", "r2") == (await find_group(store, "g")).members


async def test_nobody_joins_a_group_that_was_opened_with_its_rollouts(store):
    """A rollout that was made for it is unmade; one that was there before stays; its own members are at home."""
    name = next(name for name in (f"m{n}" for n in range(1000)) if store.same_slot("g", name))
    await store.open_group("g", {"size": b"1", "members": b'["%s"]' % name.encode()}, {name: {}}, now_ms=1)
    there = await opened(store, "there")

    await join(store, CLOCK, await opened(store, name), "g")
    for rollout in (await opened(store, "new"), await opened(store, there.name)):
        with pytest.raises(Conflict, match="not one of them"):
            await join(store, CLOCK, rollout, "g")

    assert await store.get("new") is None
    assert await store.get("there") is not None
    assert (name,) == (await find_group(store, "g")).members


async def test_a_group_deleted_while_somebody_joins_comes_into_being_again(store):
    """The rollout is in it."""
    groups = FailingStore(store.groups)
    groups.waiting["mark"] = asyncio.Event()
    joining = asyncio.ensure_future(join(SimpleNamespace(groups=groups), CLOCK, await opened(store), "g"))
    groups.reached["mark"] = asyncio.Event()
    await groups.reached["mark"].wait()
    await store.groups.delete("g")
    groups.waiting.pop("mark").set()
    await joining

    assert ("r1",) == (await find_group(store, "g")).members


async def test_who_is_finished_is_noted_in_the_group(store):
    """In this life of it only: one that is gone needs no note."""
    await join(store, CLOCK, await opened(store), "g")
    group = await find_group(store, "g")
    await mark_finished(store, CLOCK, group, "r1")

    assert {"r1"} == (await find_group(store, "g")).finished

    await store.groups.delete("g")
    await store.groups.open("g", {}, now_ms=1)
    await mark_finished(store, CLOCK, group, "r1")

    assert frozenset() == (await find_group(store, "g")).finished
    assert read_group(await store.groups.get("g")).members == ()
