"""Batches: held while the trainer works, acknowledged when it goes on, given back when it does not."""

import asyncio
from contextlib import aclosing

import pytest
from aiohttp import web
from batching import Batching, group

from tokentape import AsyncClient, ClientError


@pytest.fixture
def batching(engine):
    return Batching(engine)


@pytest.fixture
async def client(engine):
    async with AsyncClient(engine.url, attempts=1) as client:
        yield client


async def test_a_batch_is_acknowledged_when_the_body_goes_on(client, batching):
    """One after the other, until nothing comes for `wait_s`."""
    batching.ready = [[group("g1"), group("g2")], [group("g3")]]
    batches = client.batches(consumer="c", groups=2, format="trl", wait_s=0, lease_s=30, order="oldest")
    told = [(batch.batch_id, batch.groups, batching.verbs()) async for batch in batches]

    assert [("b1", [group("g1"), group("g2")], []), ("b2", [group("g3")], ["ack b1"])] == told
    assert ["ack b1", "ack b2"] == batching.verbs()
    assert {"consumer": "c", "groups": 2, "wait_s": 0, "lease_s": 30, "format": "trl", "order": "oldest"} == (
        batching.said[0][1]
    )


async def test_a_batch_is_released_when_the_body_raises(client, batching):
    """The exception stays the body's own."""
    batching.ready = [[group("g1")]]
    with pytest.raises(ZeroDivisionError):
        async with aclosing(client.batches(consumer="c", groups=1, wait_s=0)) as batches:
            async for _ in batches:
                1 / 0  # noqa: B018

    assert ["release b1"] == batching.verbs()


async def test_a_batch_is_released_when_its_release_fails_too(client, batching):
    """A lost lease hides nothing of what went wrong."""
    batching.ready, batching.lost = [[group("g1")]], {"b1"}
    with pytest.raises(ZeroDivisionError):
        async with aclosing(client.batches(consumer="c", groups=1, wait_s=0)) as batches:
            async for _ in batches:
                1 / 0  # noqa: B018


@pytest.mark.parametrize(("acknowledged", "said"), [(True, ["ack b1"]), (False, ["release b1"])])
async def test_a_loop_that_is_left_gives_back_what_was_not_acknowledged(client, batching, acknowledged, said):
    """`break`: nothing is lost, and nothing is settled twice."""
    batching.ready = [[group("g1")]]
    async with aclosing(client.batches(consumer="c", groups=1, wait_s=0)) as batches:
        async for batch in batches:
            if acknowledged:
                await batch.ack(delete=True)
            break

    assert said == batching.verbs()
    assert acknowledged == (("ack", "b1", {"delete": True}) in batching.said)


async def test_a_batch_given_back_by_hand_is_not_acknowledged(client, batching):
    """`await batch.release()` and on to the next."""
    batching.ready = [[group("g1")], [group("g2")]]
    async for batch in client.batches(consumer="c", groups=1, wait_s=0):
        if batch.groups[0]["group_id"] == "g1":
            await batch.release()

    assert ["release b1", "ack b2"] == batching.verbs()


async def test_the_lease_is_extended_while_the_body_works(client, batching):
    """At thirds of it, for the same time again; and no more once the batch is settled."""
    batching.ready = [[group("g1")]]
    async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
        await batching.extended.wait()
        assert not batch.is_lost

    assert ("extend", "b1", {"lease_s": 0.03}) in batching.said
    assert [] == [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_extend_lease"]
    assert "ack" == [said[0] for said in batching.said if said[0] != "claim"][-1]


async def test_a_lost_lease_is_told(client, batching):
    """While the body works, by `is_lost`; and going on raises, for somebody else may hold the groups."""
    batching.ready, batching.lost = [[group("g1")]], {"b1"}
    with pytest.raises(ClientError, match="409 lease_lost"):
        async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
            await batching.extended.wait()
            while not batch.is_lost:  # the answer is on its way
                await asyncio.sleep(0)

    assert 1 == sum(said[0] == "extend" for said in batching.said)


async def test_groups_that_were_lost_are_told_by_their_names(client, batching):
    """Some of a batch: the others are acknowledged."""
    batching.ready, batching.partly_lost = [[group("g1"), group("g2")]], ["g2"]
    with pytest.raises(ClientError, match="another consumer claimed g2") as caught:
        async for batch in client.batches(consumer="c", groups=2, wait_s=0, lease_s=0.03):
            await batching.extended.wait()
            while not batch.is_lost:  # the answer is on its way
                await asyncio.sleep(0)

    assert (409, "lease_lost") == (caught.value.status, caught.value.code)
    assert ["ack b1"] == batching.verbs()


async def test_a_heartbeat_survives_a_proxy_that_is_away_for_a_beat(client, batching, engine):
    """Only a lost lease is lost."""
    batching.ready = [[group("g1")]]
    away = [True]

    async def answering(request, body):
        if request.path.endswith("/extend") and away:
            away.clear()
            return web.json_response({}, status=503)
        return await batching.answer(request, body)

    engine.answering = answering
    async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
        await batching.extended.wait()
        assert not batch.is_lost

    assert ["ack b1"] == batching.verbs()


async def test_without_wait_s_the_loop_waits_for_ever(client, batching):
    """One long poll after the other."""
    batching.arrived.set()  # each poll is answered at once, with nothing

    async def first():
        async with aclosing(client.batches(consumer="c", groups=1)) as batches:
            return (await anext(batches)).batch_id

    waiting = asyncio.create_task(first())
    while len(batching.said) < 3:
        await asyncio.sleep(0)
    batching.ready = [[group("g1")]]

    assert (await waiting).startswith("b")


async def test_each_reason_why_groups_are_refused_or_dropped_is_logged_once(client, batching, caplog):
    """A loop that gets no batch says why, whichever rollout the reason names, and says it once."""
    batching.ready = [[group("g1")], [group("g2")]]
    batching.refused = [
        {"group_id": f"g{number}", "why": f"trl requires one sequence, and rollout 'r{number}' has {number}"}
        for number in (8, 9)
    ]
    batching.dropped = [{"group_id": "g7", "why": "the rewards of its 4 rollouts are all equal"}]
    async for _ in client.batches(consumer="c", groups=1, wait_s=0):
        pass

    assert [
        "group g8 is refused: trl requires one sequence, and rollout 'r8' has 8",
        "group g7 is dropped: the rewards of its 4 rollouts are all equal",
    ] == [record.message for record in caplog.records if record.name == "tokentape.client"]
