"""Deadlines of rollouts in real processes, which are killed and restarted."""

import asyncio
from contextlib import ExitStack

import pytest
from tests.support.commands import started
from tests.support.stored import stored_rollout

from proxy.rollouts.group import find_group

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TIMEOUT_S = 60


@pytest.fixture
def replica(engine, server, store, monkeypatch):
    """A factory of replicas with the test's store, in front of an engine that does not respond."""
    engine.hangs()
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", store._store.layout.prefix)
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "error")
    words = ("serve", "--listen", "127.0.0.1:0", "--store", f"unix:{server.socket}", "--engine", engine.url)
    with ExitStack() as stack:

        async def start():
            process, url, _ = await asyncio.to_thread(stack.enter_context, started(*words))
            return process, url

        yield start


async def post(http, url, body):
    async with http.post(url, json=body) as response:
        return await response.json()


async def open_groups(http, url, count, **terms):
    """Open groups of four rollouts; return the IDs of the rollouts."""
    bodies = [{"group_id": f"g{number}", "size": 4, **terms} for number in range(count)]
    groups = await asyncio.gather(*(post(http, url + "/groups", body) for body in bodies))
    return [rollout["rollout_id"] for group in groups for rollout in group["rollouts"]]


async def all_complete(store, count):
    async with asyncio.timeout(TIMEOUT_S):
        for number in range(count):
            while (await find_group(store, f"g{number}")).is_open:
                await asyncio.sleep(0.05)


async def endings(store, names):
    rollouts = [await stored_rollout(store, name) for name in names]
    return {(rollout.status, rollout.reason) for rollout in rollouts}


async def test_deadlines_apply_after_all_processes_were_killed_and_one_was_restarted(replica, store, http):
    process, url = await replica()
    names = await open_groups(http, url, 3, deadline_s=3)
    process.kill()
    process.wait()
    before = await endings(store, names)
    await replica()
    await all_complete(store, 3)

    assert before == {("open", None)}
    assert await endings(store, names) == {("aborted", "deadline")}


async def test_a_process_that_is_killed_while_it_finishes_rollouts_leaves_them_to_another(replica, store, http):
    """Every rollout is finished, and every group is in the queue once."""
    (first, url), (_second, _) = await asyncio.gather(replica(), replica())
    names = await open_groups(http, url, 150, deadline_s=2)
    async with asyncio.timeout(TIMEOUT_S):
        while not any([(await stored_rollout(store, name)).is_finished for name in names[::20]]):
            await asyncio.sleep(0.001)
    first.kill()
    await all_complete(store, 150)
    queued = [entry.group for entry in (await store.queue.read(limit=1000)).groups]

    assert await endings(store, names) == {("aborted", "deadline")}
    assert sorted(f"g{number}" for number in range(150)) == sorted(queued)


async def test_a_rollout_is_idle_once_its_process_is_killed_during_a_call(replica, store, engine, http):
    """While the process was alive, the call kept the rollout open, although the other one swept."""
    (first, url), (_second, other) = await asyncio.gather(replica(), replica())
    for name in ("busy", "idle"):
        await post(http, other + "/rollouts", {"rollout_id": name, "idle_s": 1.2, "start_s": 1.2})
    call = asyncio.ensure_future(http.post(f"{url}/rollouts/busy{CHAT}", json=BODY))
    async with asyncio.timeout(TIMEOUT_S):
        await engine.reached.wait()
        while (rollout := await stored_rollout(store, "busy")).touched_ms < rollout.created_ms + 4000:
            await asyncio.sleep(0.05)
    first.kill()
    alive = rollout.status
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(TIMEOUT_S):
        while not (rollout := await stored_rollout(store, "busy")).is_finished:
            await asyncio.sleep(0.05)

    assert alive == "open"
    assert await endings(store, ("busy", "idle")) == {("aborted", "deadline")}
    assert rollout.finished_ms - rollout.created_ms >= 5200
