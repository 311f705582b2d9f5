"""Admission of calls: creation of rollouts, and behaviour while the store is unavailable."""

import asyncio

import pytest
from tests.support.recorded import load
from tests.support.session import BODY, CHAT, chat_path, one_call, session_with
from tests.support.stored import stored_rollout, stored_steps, wait_for_steps


@pytest.fixture(autouse=True)
def cassette(engine):
    """The engine responds to all requests with one completion."""
    engine.plays(load("chat_ids_lp"))


async def test_x_rollout_group_sets_the_group_of_a_new_rollout(store, engine):
    await one_call(engine, store, headers={"X-Rollout-Group": "g1"})

    assert "g1" == (await stored_rollout(store, "r1")).group_id


async def test_while_the_store_is_unreachable_calls_are_503_without_a_request_to_the_engine(store, engine):
    """The response has Retry-After and the dialect's shape; calls succeed again once the store is reachable."""
    async with session_with(engine, store) as session:
        store.failing |= {"append", "probe"}
        first = await session.post(CHAT, BODY)
        requests = len(engine.requests)
        second = await session.post(CHAT, BODY)
        requests_meanwhile = len(engine.requests) - requests
        store.failing.clear()
        async with asyncio.timeout(50):
            while (await session.post(CHAT, BODY)).status == 503:
                await asyncio.sleep(0.01)

    assert [503, 503] == [first.status, second.status]
    assert ("store_unavailable", "1") == (second.json["error"]["code"], second.headers["Retry-After"])
    assert 0 == requests_meanwhile
    assert 1 == len(await stored_steps(store, "r1"))


async def test_with_a_journal_calls_of_cached_rollouts_succeed_while_the_store_is_unreachable(store, engine, tmp_path):
    """/ready reports the number of journaled steps; a call of another rollout is 503."""
    journal = {"on_failure": "spool", "spool_path": tmp_path / "spool"}
    outages = [("r1", ()), ("r1", ("append", "probe", "ping")), ("r1", ("open",)), ("r2", ())]
    statuses = []
    async with session_with(engine, store, store=journal) as session:
        for rollout, failing in outages:
            store.failing |= set(failing)
            statuses.append((await session.post(chat_path(rollout), BODY)).status)
        ready = await session.get("/ready")
        store.failing.clear()
        await wait_for_steps(store, "r1", 3)

    assert [200, 200, 200, 503] == statuses
    assert (200, 2, "the test took the store away") == (ready.status, ready.json["spooled"], ready.json["store"])
