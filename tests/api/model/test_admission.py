"""Admission of calls: creation of rollouts, and behaviour while the store is unavailable."""

import asyncio

import pytest
from tests.support.fakes import proxying, settings_for
from tests.support.recorded import load
from tests.support.stored import stored_rollout, stored_steps, wait_for_steps

from proxy.server.listener import running

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def cassette(engine):
    """The engine responds to all requests with one completion."""
    engine.plays(load("chat_ids_lp"))


async def test_x_rollout_group_sets_the_group_of_a_new_rollout(store, engine, http):
    async with proxying(engine.url, store) as served:
        path = served.url + "/rollouts/r1/v1/chat/completions"
        async with http.post(path, json=BODY, headers={"X-Rollout-Group": "g1"}) as response:
            assert 200 == response.status

    assert "g1" == (await stored_rollout(store, "r1")).group_id


async def test_while_the_store_is_unreachable_calls_are_503_without_a_request_to_the_engine(store, engine, http):
    """The response has Retry-After and the dialect's shape; calls succeed again once the store is reachable."""
    async with proxying(engine.url, store) as served:
        store.failing |= {"append", "set_once"}
        path = served.url + "/rollouts/r1/v1/chat/completions"
        async with http.post(path, json=BODY) as first:
            pass
        requests = len(engine.requests)
        async with http.post(path, json=BODY) as second:
            payload = await second.json()
        requests_meanwhile = len(engine.requests) - requests
        store.failing.clear()
        async with asyncio.timeout(50):
            while (await http.post(path, json=BODY)).status == 503:
                await asyncio.sleep(0.01)

    assert [503, 503] == [first.status, second.status]
    assert ("store_unavailable", "1") == (payload["error"]["code"], second.headers["Retry-After"])
    assert 0 == requests_meanwhile
    assert 1 == len(await stored_steps(store, "r1"))


async def test_with_a_journal_calls_of_cached_rollouts_succeed_while_the_store_is_unreachable(
    store, engine, http, tmp_path
):
    """/ready reports the number of journaled steps; a call of another rollout is 503."""
    journal = {"on_failure": "spool", "spool_path": tmp_path / "spool"}
    async with running(settings_for(engine.url, store=journal), store) as served:
        cached, new = (f"{served.url}/rollouts/{name}/v1/chat/completions" for name in ("r1", "r2"))
        statuses = []
        for url, failing in ((cached, ()), (cached, ("append", "set_once", "ping")), (cached, ("open",)), (new, ())):
            store.failing |= set(failing)
            async with http.post(url, json=BODY) as response:
                statuses.append(response.status)
        async with http.get(served.url + "/ready") as ready:
            payload = await ready.json()
        store.failing.clear()
        await wait_for_steps(store, "r1", 3)

    assert [200, 200, 200, 503] == statuses
    assert (200, 2, "the test took the store away") == (ready.status, payload["spooled"], payload["store"])
