"""The admission of calls: a rollout comes into being with its first call, and what the store's absence does to that."""

import asyncio

import pytest
from fakes import proxying, settings_for
from recorded import load
from stored import stored_rollout, stored_steps, wait_for_steps

from proxy.server.listener import running

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def answered(engine):
    """The engine has an answer to everything."""
    engine.plays(load("chat_ids_lp"))


async def test_the_group_of_a_new_rollout_is_named_by_header(store, engine, http):
    """X-Rollout-Group holds for the rollout that this call creates."""
    async with proxying(engine.url, store) as served:
        path = served.url + "/rollouts/r1/v1/chat/completions"
        async with http.post(path, json=BODY, headers={"X-Rollout-Group": "g1"}) as response:
            assert 200 == response.status

    assert "g1" == (await stored_rollout(store, "r1")).group_id


async def test_while_the_store_is_known_to_be_away_calls_are_refused_early(store, engine, http):
    """503 with Retry-After, in the dialect's shape; neither store nor engine is asked. Once it is back, calls go on."""
    async with proxying(engine.url, store) as served:
        store.failing |= {"append", "set_once"}
        path = served.url + "/rollouts/r1/v1/chat/completions"
        async with http.post(path, json=BODY) as first:
            pass
        asked = len(engine.requests)
        async with http.post(path, json=BODY) as second:
            told = await second.json()
        early = len(engine.requests) - asked
        store.failing.clear()
        async with asyncio.timeout(50):
            while (await http.post(path, json=BODY)).status == 503:
                await asyncio.sleep(0.01)

    assert [503, 503] == [first.status, second.status]
    assert ("store_unavailable", "1") == (told["error"]["code"], second.headers["Retry-After"])
    assert 0 == early
    assert 1 == len(await stored_steps(store, "r1"))


async def test_with_a_journal_rollouts_that_are_known_go_on_while_the_store_is_away(store, engine, http, tmp_path):
    """They end as ever, and /ready says how many steps wait; a rollout that nobody here knows is refused."""
    spooling = {"on_failure": "spool", "spool_path": tmp_path / "spool"}
    async with running(settings_for(engine.url, store=spooling), store) as served:
        known, new = (f"{served.url}/rollouts/{name}/v1/chat/completions" for name in ("r1", "r2"))
        statuses = []
        for url, failing in ((known, ()), (known, ("append", "set_once", "ping")), (known, ("open",)), (new, ())):
            store.failing |= set(failing)
            async with http.post(url, json=BODY) as response:
                statuses.append(response.status)
        async with http.get(served.url + "/ready") as ready:
            told = await ready.json()
        store.failing.clear()
        await wait_for_steps(store, "r1", 3)

    assert [200, 200, 200, 503] == statuses
    assert (200, 2, "the test took the store away") == (ready.status, told["spooled"], told["store"])
