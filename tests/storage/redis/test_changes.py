"""Subscriptions to changes of rollouts; those of a cluster's bad days are in `test_cluster.py`."""

import asyncio

import pytest

from storage.errors import StorageError, StoreUnreachable
from storage.redis.changes import decode_change
from storage.types import Change, StepWrite


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """Return an empty store."""
    return await opened(url_of(request.param))


async def test_every_change_of_a_rollout_is_published_in_order(store):
    """Open, appends, marks, updates and delete are; a repeated append is published once, a read not at all."""
    async with store.changes.subscribe() as changes:
        incarnation = (await store.open("a b/🙂", {}, now_ms=1)).incarnation
        await store.open("a b/🙂", {}, now_ms=2)
        for name in ("s1", "s2", "s2"):
            await store.append(StepWrite("a b/🙂", incarnation, name, b"record"), now_ms=3)
        await store.mark("a b/🙂", incarnation, {"m": b"1"}, now_ms=4)
        await store.update_if("a b/🙂", {"status": b"1"}, expect={}, now_ms=5)
        await store.get("a b/🙂")
        await store.delete("a b/🙂")
        received = [await anext(changes) for _ in range(6)]

    plain = Change("a b/🙂")
    assert [plain, Change("a b/🙂", 0, "s1"), Change("a b/🙂", 1, "s2"), plain, plain, plain] == received


async def test_rollouts_opened_with_a_group_are_published(store):
    """Each by its name; the group is in another namespace and is not."""
    names = [name for name in map(str, range(5000)) if store.same_slot("g", name)][:3]
    async with store.changes.subscribe() as changes:
        await store.open_group("g", {}, {name: {} for name in names}, now_ms=1)
        await store.open("after", {}, now_ms=2)
        received = {(await anext(changes)).rollout for _ in range(4)}

    assert received == {*names, "after"}


async def test_changes_in_every_bucket_reach_all_subscribers(store):
    """Whichever server of a cluster has the rollouts and the subscription."""
    names = {f"r{number}" for number in range(64)}
    async with store.changes.subscribe() as first, store.changes.subscribe() as second:
        await asyncio.gather(*(store.open(name, {}, now_ms=1) for name in names))

        assert names == {(await anext(first)).rollout for _ in names}
        assert names == {(await anext(second)).rollout for _ in names}


async def test_an_idle_subscription_checks_the_server(opened, start, monkeypatch):
    """None while the server responds to PING; `StoreUnreachable` if it does not."""
    monkeypatch.setattr("storage.redis.changes._IDLE_TIMEOUT_S", 0.05)
    server = start()
    store = await opened(server.url)
    async with store.changes.subscribe() as changes:
        assert None is await anext(changes)
        assert None is await anext(changes)
        server.stop()
        with pytest.raises(StoreUnreachable):
            [change async for change in changes]
    with pytest.raises(StoreUnreachable):
        async with store.changes.subscribe():
            pass


async def test_a_user_without_channels_can_write_but_not_subscribe(opened, start_redis):
    """A PUBLISH that an ACL forbids does not fail a write; the error of `subscribe` names the permission."""
    server = start_redis()
    with server.client as client:
        client.execute_command("ACL", "SETUSER", "tape", "on", ">word", "~tokentape:*", "+@all", "resetchannels")
    store = await opened(server.url, username="tape", password="word", prefix="tokentape")

    assert (await store.open("r", {}, now_ms=1)).created
    with pytest.raises(StorageError, match="channel"):
        async with store.changes.subscribe():
            pass


@pytest.mark.parametrize(
    ("message", "change"), [(b"a%20b", Change("a b")), (b"%ED%A0%80 12 s1", Change("\ud800", 12, "s1"))]
)
def test_a_message_has_a_name_and_optionally_a_record(message, change):
    """Names are percent-encoded."""
    assert change == decode_change(message)
