"""Several processes over one store, each with a port of its own: replicas, which keep nothing that the others need."""

import asyncio
from collections import Counter
from contextlib import ExitStack

import aiohttp
import pytest
from commands import started
from recorded import load
from stored import rollout_of, steps_of

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def urls(engine, server, store, monkeypatch):
    """Three replicas over the store of the test, before its engine."""
    engine.plays(load("chat_ids_lp"))
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", store._store._prefix)
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "warning")  # nobody reads the log here, and a full pipe would stop it
    words = ("serve", "--listen", "127.0.0.1:0", "--store", f"unix:{server.socket}", "--engine", engine.url)
    with ExitStack() as stack:
        starts = [asyncio.to_thread(stack.enter_context, started(*words)) for _ in range(3)]
        yield [url for _, url, _ in await asyncio.gather(*starts)]


async def ask(http: aiohttp.ClientSession, method, url, **said):
    async with http.request(method, url, **said) as answer:
        return answer.status, await answer.json()


async def test_one_rollouts_calls_may_be_spread_over_all_of_them(urls, store, http):
    """Its tree is whole, its indices are unique, its counts are right, and each tells the same of it."""
    messages = BODY["messages"]
    for turn in range(9):
        body = {**BODY, "messages": messages}
        status, answer = await ask(http, "POST", f"{urls[turn % 3]}/rollouts/r1{CHAT}", json=body)
        assert 200 == status
        messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    alone = [f"{urls[n % 3]}/rollouts/r1{CHAT}" for n in range(30)]
    answers = await asyncio.gather(*(ask(http, "POST", url, json=BODY) for url in alone))
    steps = await steps_of(store, "r1")
    told = [await ask(http, "GET", f"{url}/rollouts/r1{what}") for url in urls for what in ("", "/tree", "/steps")]

    assert [200] * 30 == [status for status, _ in answers]
    assert list(range(39)) == [step.index for step in steps]
    assert 39 == len({step.step_id for step in steps})
    assert 39 == (await rollout_of(store, "r1")).counts["steps"]
    assert sum(step.sampled for step in steps) == (await rollout_of(store, "r1")).counts["sampled_tokens"]
    shown = [{**answer, "base_url": None} for status, answer in told]
    assert shown[:3] == shown[3:6] == shown[6:]


async def test_the_policy_and_its_pause_hold_at_all_of_them(urls, store, engine, http):
    """Whoever is told of them: a call made anywhere is of the version announced, or waits."""
    versions = []
    for number, url in enumerate(urls):
        await ask(http, "PUT", f"{url}/policy", json={"version": f"v{number}"})
        for other in urls:
            await ask(http, "POST", f"{other}/rollouts/r1{CHAT}", json=BODY)
        versions += [step.policy_version for step in (await steps_of(store, "r1"))[-3:]]
    paused = await ask(http, "POST", f"{urls[0]}/policy/pause", json={"mode": "reject"})
    refused = [(await ask(http, "POST", f"{url}/rollouts/r1{CHAT}", json=BODY))[0] for url in urls]
    await ask(http, "POST", f"{urls[1]}/policy/resume")
    async with asyncio.timeout(50):
        while (await ask(http, "POST", f"{urls[2]}/rollouts/r1{CHAT}", json=BODY))[0] != 200:
            pass

    assert ["v0"] * 3 + ["v1"] * 3 + ["v2"] * 3 == versions
    assert 200 == paused[0]
    assert [429] * 3 == refused


async def test_a_limit_holds_over_all_of_them_and_counts_calls_in_flight(urls, store, engine, http):
    """Fifty calls at once on three processes, of a rollout that takes five steps: five reach the engine."""
    for number in range(3):
        name = f"limited-{number}"
        limits = {"rollout_id": name, "limits": {"max_steps": 5}}
        await ask(http, "POST", f"{urls[0]}/rollouts", json=limits)
        before = len(engine.asked)
        calls = [ask(http, "POST", f"{urls[n % 3]}/rollouts/{name}{CHAT}", json=BODY) for n in range(50)]
        statuses = Counter(status for status, _ in await asyncio.gather(*calls))

        assert {200: 5, 429: 45} == statuses
        assert 5 == len(engine.asked) - before == len(await steps_of(store, name))
        rollout = await rollout_of(store, name)
        assert ("limited", 5) == (rollout.status, rollout.counts["steps"])
