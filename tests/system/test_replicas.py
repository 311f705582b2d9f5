"""Several processes with one store, each with its own port: replicas, which keep no state that the others need."""

import asyncio
from collections import Counter
from contextlib import ExitStack

import aiohttp
import pytest
from tests.support.commands import started
from tests.support.continued_calls import Served, continuations, tapped
from tests.support.recorded import load
from tests.support.stored import stored_rollout, stored_steps

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def urls(engine, server, store, monkeypatch):
    """Three replicas with the test's store and engine."""
    engine.plays(load("chat_ids_lp"))
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", store._store.layout.prefix)
    # The log is not read, and a full pipe would block the process.
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "warning")
    words = ("serve", "--listen", "127.0.0.1:0", "--store", f"unix:{server.socket}", "--engine", engine.url)
    with ExitStack() as stack:
        starts = [asyncio.to_thread(stack.enter_context, started(*words)) for _ in range(3)]
        yield [url for _, url, _ in await asyncio.gather(*starts)]


@pytest.fixture
def replica(server, store, http, monkeypatch):
    """A factory of replicas with the test's store, each in front of an engine."""
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", store._store.layout.prefix)
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "warning")
    monkeypatch.setenv("TOKENTAPE_CONTINUATION__MODE", "append")
    with ExitStack() as stack:

        async def start(engine) -> Served:
            words = ("serve", "--listen", "127.0.0.1:0", "--store", f"unix:{server.socket}", "--engine", engine.url)
            process, url, _ = await asyncio.to_thread(stack.enter_context, started(*words))
            return Served(url, http, engine, store, process)

        yield start


async def send(http: aiohttp.ClientSession, method, url, **options):
    async with http.request(method, url, **options) as response:
        return response.status, await response.json()


async def test_the_calls_of_one_rollout_may_go_to_different_replicas(urls, store, http):
    """Its tree is complete, its indices are unique, its counts are right, and each replica returns the same."""
    messages = BODY["messages"]
    for turn in range(9):
        body = {**BODY, "messages": messages}
        status, response = await send(http, "POST", f"{urls[turn % 3]}/rollouts/r1{CHAT}", json=body)
        assert status == 200
        messages = [*messages, response["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    alone = [f"{urls[n % 3]}/rollouts/r1{CHAT}" for n in range(30)]
    responses = await asyncio.gather(*(send(http, "POST", url, json=BODY) for url in alone))
    steps = await stored_steps(store, "r1")
    results = [await send(http, "GET", f"{url}/rollouts/r1{what}") for url in urls for what in ("", "/tree", "/steps")]

    assert [status for status, _ in responses] == [200] * 30
    assert [step.index for step in steps] == list(range(39))
    assert len({step.step_id for step in steps}) == 39
    assert (await stored_rollout(store, "r1")).counts["steps"] == 39
    assert sum(step.sampled for step in steps) == (await stored_rollout(store, "r1")).counts["sampled_tokens"]
    shown = [{**response, "base_url": None} for status, response in results]
    assert shown[:3] == shown[3:6] == shown[6:]


async def test_the_policy_version_and_the_pause_apply_to_all_replicas(urls, store, engine, http):
    """Whichever replica is called: a call has the announced version, or waits."""
    versions = []
    for number, url in enumerate(urls):
        await send(http, "PUT", f"{url}/policy", json={"version": f"v{number}"})
        for other in urls:
            await send(http, "POST", f"{other}/rollouts/r1{CHAT}", json=BODY)
        versions += [step.policy_version for step in (await stored_steps(store, "r1"))[-3:]]
    paused = await send(http, "POST", f"{urls[0]}/policy/pause", json={"mode": "reject"})
    refused = [(await send(http, "POST", f"{url}/rollouts/r1{CHAT}", json=BODY))[0] for url in urls]
    await send(http, "POST", f"{urls[1]}/policy/resume")
    async with asyncio.timeout(50):
        while (await send(http, "POST", f"{urls[2]}/rollouts/r1{CHAT}", json=BODY))[0] != 200:
            pass

    assert versions == ["v0"] * 3 + ["v1"] * 3 + ["v2"] * 3
    assert paused[0] == 200
    assert refused == [429] * 3


async def test_max_steps_applies_to_all_replicas_and_counts_calls_in_flight(urls, store, engine, http):
    """Of fifty concurrent calls to three processes in a rollout with max_steps 5, five reach the engine."""
    for number in range(3):
        name = f"limited-{number}"
        limits = {"rollout_id": name, "limits": {"max_steps": 5}}
        await send(http, "POST", f"{urls[0]}/rollouts", json=limits)
        before = len(engine.requests)
        calls = [send(http, "POST", f"{urls[n % 3]}/rollouts/{name}{CHAT}", json=BODY) for n in range(50)]
        statuses = Counter(status for status, _ in await asyncio.gather(*calls))

        assert statuses == {200: 5, 429: 45}
        assert len(engine.requests) - before == len(await stored_steps(store, name)) == 5
        rollout = await stored_rollout(store, name)
        assert (rollout.status, rollout.counts["steps"]) == ("limited", 5)


async def test_replicas_that_take_turns_continue_one_sequence(replica):
    """Each reads the other's steps from the store, and sends their ids as the prompt, streamed and not."""
    async with tapped(template="qwen3") as engine:
        replicas = await asyncio.gather(replica(engine), replica(engine))
        agent = replicas[0].agent("r1", tools=True)
        for turn in range(6):
            agent.served, agent.stream = replicas[turn % 2], turn > 2
            await agent.turn(f"Question {turn}?")
        steps = await replicas[0].steps("r1")
        rows = [await one.rows("r1") for one in replicas]
        await replicas[0].check_bridges("r1")

    assert continuations(steps) == [None, *["sent"] * 5]
    assert all(step.exact for step in steps)
    assert len(rows[0]) == 1
    assert rows[0] == rows[1]


async def test_a_rollout_is_continued_after_a_restart_between_its_turns(replica):
    """The process is killed, and another one has none of its memory."""
    async with tapped(template="qwen3") as engine:
        first = await replica(engine)
        agent = first.agent("r1", tools=True)
        await agent.turns(3)
        first.proxy.kill()
        agent.served = second = await replica(engine)
        await agent.turns(3)
        steps, rows = await second.steps("r1"), await second.rows("r1")
        counts = await second.counts()

    assert continuations(steps) == [None, *["sent"] * 5]
    assert len(rows) == 1
    assert counts["continued"] + counts["unchanged"] == 3
