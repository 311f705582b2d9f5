"""Late steps: steps that end after their rollout was finished."""

import asyncio

import pytest
from aiohttp import web
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.stored import stored_rollout, wait_for_steps

from proxy.server.listener import running

WHOLE = load("chat_ids_lp")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def proxy(store, engine, http):
    """A proxy; its engine responds while `engine.hold` is set."""
    engine.hold = asyncio.Event()
    engine.hold.set()

    async def respond(request, body):
        await engine.hold.wait()
        return web.Response(body=WHOLE.response, content_type="application/json")

    engine.respond = respond
    async with running(settings_for(engine.url), store) as served:
        yield Session(http, served.url)


class Session:
    def __init__(self, http, url) -> None:
        self.http, self.url = http, url

    async def call(self, method, path, body=None):
        async with self.http.request(method, self.url + path, json=body) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    async def chat(self, rollout, **more):
        async with self.http.post(f"{self.url}/rollouts/{rollout}/v1/chat/completions", json=BODY | more) as response:
            await response.read()
            return response.status

    async def export(self, path, include="exact"):
        payload = await self.call("GET", f"{path}/export?format=sequences&container=json&include={include}")
        return payload["rows"] if isinstance(payload, dict) else payload


async def start_call(proxy, engine, rollout, **more):
    """Start a call; return once the engine has it. It completes after `engine.hold` is set."""
    before = len(engine.requests)
    engine.hold.clear()
    call = asyncio.ensure_future(proxy.chat(rollout, **more))
    async with asyncio.timeout(50):
        while len(engine.requests) == before:
            await asyncio.sleep(0.005)
    return call


async def test_a_late_step_is_stored_flagged_and_excluded_from_exact_exports(proxy, engine, store):
    """The step, the tree, the counts, the metrics and the rows are marked as late."""
    await proxy.chat("r1")
    call = await start_call(proxy, engine, "r1", seed=2)
    await proxy.call("POST", "/rollouts/r1/finish", {"status": "completed", "reward": 1.0})
    before = await proxy.export("/rollouts/r1")
    engine.hold.set()
    status = await call
    steps = (await proxy.call("GET", "/rollouts/r1/steps"))["steps"]
    tree = await proxy.call("GET", "/rollouts/r1/tree")
    counts = (await proxy.call("GET", "/rollouts/r1"))["counts"]
    flagged = await proxy.export("/rollouts/r1", "flagged")
    async with proxy.http.get(proxy.url + "/metrics") as response:
        metrics = await response.text()
    async with proxy.http.get(proxy.url + "/rollouts/r1/export?format=sequences&container=json") as response:
        skipped = response.headers["X-Export-Skipped"]

    assert status == 200
    assert [step["late"] for step in steps] == [False, True]
    assert [node["late"] for node in tree["nodes"]] == [False, True]
    assert (counts["steps"], counts["late"]) == (2, 1)
    assert len(before) == 1
    assert before == await proxy.export("/rollouts/r1")
    assert [row.get("problems") for row in flagged] == [None, ["late"]]
    assert "tokentape_late_steps_total 1.0" in metrics
    assert "ended after the rollout was finished" in skipped


async def test_a_claim_has_the_numbers_of_late_steps(proxy, engine, store):
    """Steps after the claim are late too, and change nothing that was claimed."""
    opened = await proxy.call("POST", "/groups", {"group_id": "g1", "size": 2})
    names = [rollout["rollout_id"] for rollout in opened["rollouts"]]
    for name in names:
        await proxy.chat(name)
    calls = [await start_call(proxy, engine, names[0], seed=seed) for seed in (2, 3)]
    for name in names:
        await proxy.call("POST", f"/rollouts/{name}/finish", {"status": "completed", "reward": 1.0})
    calls[0].cancel()
    await wait_for_steps(store, names[0], 2)
    batch = await proxy.call("POST", "/batches/claim", {"consumer": "trainer", "format": "sequences"})
    engine.hold.set()
    assert await calls[1] == 200
    await wait_for_steps(store, names[0], 3)
    (group,) = batch["groups"]

    assert {names[0]: 1} == group["late"]
    assert len(group["data"]) == 2
    assert (await stored_rollout(store, names[0])).counts["late"] == 2
    assert len(await proxy.export("/groups/g1")) == 2


async def test_with_concurrent_finishes_claims_and_calls_an_export_equals_the_claim(proxy, engine, store):
    for round_ in range(4):
        opened = await proxy.call("POST", "/groups", {"group_id": f"g{round_}", "size": 2})
        names = [rollout["rollout_id"] for rollout in opened["rollouts"]]
        permits = asyncio.Semaphore(0)

        async def respond(request, body, permits=permits):
            await permits.acquire()
            return web.Response(body=WHOLE.response, content_type="application/json")

        engine.respond = respond
        calls = [asyncio.ensure_future(proxy.chat(name, seed=seed)) for name in names for seed in range(4)]
        await wait_until(lambda round_=round_: len(engine.requests) == 8 * (round_ + 1))
        for _ in range(round_):
            permits.release()
        await wait_until(lambda calls=calls, round_=round_: sum(call.done() for call in calls) == round_)
        finishing = [
            proxy.call("POST", f"/rollouts/{name}/finish", {"status": "completed", "reward": 1.0}) for name in names
        ]
        meanwhile = [asyncio.ensure_future(finish) for finish in finishing]
        for _ in range(2):
            permits.release()
        await asyncio.gather(*meanwhile)
        claiming = asyncio.ensure_future(proxy.call("POST", "/batches/claim", {"consumer": "trainer", "min_group": 1}))
        for _ in range(2):
            permits.release()
        (group,) = (await claiming)["groups"]
        for _ in calls:
            permits.release()
        assert set(await asyncio.gather(*calls)) == {200}
        rows = await proxy.export(f"/groups/g{round_}", "exact&min_group=1")

        assert [row["spans"] for row in group["data"]] == [row["spans"] for row in rows]
        assert len(await proxy.export(f"/groups/g{round_}", "flagged")) == 8


async def wait_until(condition):
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.005)
