"""Calls while endpoints of their policy are held, and the versions of their steps."""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import get_args

import orjson
import pytest
from tests.support.fakes import listening, proxying
from tests.support.scripted_engine import REPLY, ScriptedEngine, tokens_of
from tests.support.stored import stored_steps, wait_for_steps

from proxy.protocols.resume import Refusal
from tokentape import AsyncClient

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


class Fleet:
    """A proxy before two scripted engines, `a` and `b`."""

    def __init__(self, url, http, engines, urls) -> None:
        self.url, self.http, self.engines, self.urls = url, http, engines, urls

    async def call(self, rollout, body=BODY):
        async with self.http.post(f"{self.url}/rollouts/{rollout}/v1/chat/completions", json=body) as response:
            return response.status, await response.read()

    async def hold(self, *labels, drain_s=20):
        async with AsyncClient(self.url) as client:
            return await client.pause(in_flight="resume", endpoints=labels, drain_s=drain_s)

    async def release(self, *labels, version=None):
        async with AsyncClient(self.url) as client:
            await client.resume(endpoints=labels or None, version=version)

    @property
    def counts(self):
        return [len(engine.requests) for engine in self.engines]


@asynccontextmanager
async def fleets(store, http, **agents):
    """A fleet; each process of the store has the same two engines."""
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(), ScriptedEngine()]
        urls = [await stack.enter_async_context(listening(engine.handle)) for engine in engines]
        endpoints = [{"url": url, "name": name, "kind": "vllm"} for url, name in zip(urls, "ab", strict=True)]
        proxy = proxying(None, store, agents={"max_resumes": 9, **agents}, engines={"endpoints": endpoints})
        served = await stack.enter_async_context(proxy)
        yield Fleet(served.url, http, engines, urls)


@pytest.fixture
async def fleet(store, http):
    """A fleet with the limits of the settings."""
    async with fleets(store, http) as made:
        yield made


def text_of(raw):
    """The text of a stream of events."""
    events = [orjson.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def test_no_call_is_sent_to_a_held_endpoint(fleet):
    """Whichever endpoint its rollout has; after the release both serve."""
    await fleet.hold("a")
    statuses = {(await fleet.call(f"r{number}"))[0] for number in range(20)}
    held = fleet.counts
    await fleet.release("a")
    await asyncio.gather(*(fleet.call(f"r{number}") for number in range(20)))

    assert ({200}, [0, 20]) == (statuses, held)
    assert all(count > before for count, before in zip(fleet.counts, held, strict=True))


async def test_a_stream_moves_to_the_other_endpoint_when_its_own_is_held(fleet, store):
    """The client reads one reply. The step has a span of each endpoint's version, and no token twice."""
    first = await endpoint_of(fleet, "r1")
    at, other = fleet.engines[first], "ba"[first]
    await fleet.release(other, version=7)
    at.ends = [(5, "held")]
    call = asyncio.create_task(fleet.call("r1", STREAM))
    await at.held.wait()
    held = await fleet.hold("ab"[first])
    status, raw = await call
    steps = await wait_for_steps(store, "r1", 2)
    choice = steps[-1].choices[0]

    assert {"mode": None, "in_flight": 0, "drained": True, "held": ["ab"[first]], "versions": {other: "7"}} == held
    assert (200, REPLY, tokens_of(REPLY)) == (status, text_of(raw), [*choice.ids])
    assert [(0, 5, None), (5, len(tokens_of(REPLY)), "7")] == [
        (span.start, span.end, span.policy_version) for span in choice.spans
    ]
    assert ["ab".index(name) for name in ("ab"[first], steps[-1].engine.name)] == [first, 1 - first]
    assert ["ab"[first]] == [attempt["endpoint"] for attempt in steps[-1].extra["attempts"]]


async def endpoint_of(fleet, rollout):
    """The number of the endpoint at which a rollout's calls begin; one call shows it."""
    before = fleet.counts
    await fleet.call(rollout)
    return next(at for at in (0, 1) if fleet.counts[at] > before[at])


async def test_calls_wait_while_all_endpoints_are_held(fleet):
    """They are not in flight meanwhile, new ones and interrupted ones."""
    at = fleet.engines[await endpoint_of(fleet, "r1")]
    at.ends = [(5, "held")]
    running = asyncio.create_task(fleet.call("r1", STREAM))
    await at.held.wait()
    held = await fleet.hold("a", "b")
    new = asyncio.create_task(fleet.call("r2"))
    done, _ = await asyncio.wait([running, new], timeout=0.3)
    sent = fleet.counts
    await fleet.release()

    assert (0, True, set()) == (held["in_flight"], held["drained"], done)
    assert [((await running)[0], text_of((await running)[1])), (await new)[0]] == [(200, REPLY), 200]
    assert sum(sent) + 2 == sum(fleet.counts)


async def test_a_call_that_waits_for_an_endpoint_too_long_is_429(store, http):
    """Nothing is recorded."""
    async with fleets(store, http, pause_timeout_s=0.05) as fleet:
        await fleet.hold("a", "b")
        status, raw = await fleet.call("r1")

    assert (status, orjson.loads(raw)["error"]["code"]) == (429, "paused")
    assert await stored_steps(store, "r1") == []


async def test_a_call_whose_endpoint_is_held_before_it_is_sent_goes_to_the_other(fleet, monkeypatch):
    """It was planned for the endpoint before."""
    from proxy.api.model import relay

    first = await endpoint_of(fleet, "r1")
    sent = relay._sent

    async def held_before(call):
        if call.plan.step_id not in seen:
            seen.add(call.plan.step_id)
            await fleet.hold("ab"[first], drain_s=0)
        return await sent(call)

    seen = set()
    monkeypatch.setattr(relay, "_sent", held_before)
    before = fleet.counts
    status, _ = await fleet.call("r1")

    assert (
        status,
        [now - then for now, then in zip(fleet.counts, before, strict=True)],
    ) == (200, [1, 0] if first else [0, 1])


@pytest.mark.parametrize("rolling", [False, True])
async def test_an_agent_does_not_notice_updates_of_the_weights(fleet, store, rolling):
    """Its reply is that of an engine that was never updated, with a span for each version that sampled it."""
    for engine in fleet.engines:
        engine.ends = [(8, "held")] * 3
    updated = []
    async with AsyncClient(fleet.url) as client:
        await client.put_policy(1)
        call = asyncio.create_task(fleet.call("r1", STREAM))
        for version in (2, 3):
            async with asyncio.timeout(50):
                while not any(engine.held.is_set() for engine in fleet.engines):
                    await asyncio.sleep(0.01)
            for engine in fleet.engines:
                engine.held.clear()
            await client.update_policy(version, lambda *endpoint: updated.append(endpoint), rolling=rolling)
        for engine in fleet.engines:
            engine.released.set()
        status, raw = await call
    (step,) = await wait_for_steps(store, "r1")
    (choice,) = step.choices
    versions = [span.policy_version for span in choice.spans]

    assert (200, REPLY, tokens_of(REPLY)) == (status, text_of(raw), [*choice.ids])
    assert (step.status, step.problems) == ("complete", ())
    assert (versions[0], versions) == ("1", sorted(versions))
    assert [0, *(span.end for span in choice.spans)] == [*(span.start for span in choice.spans), len(choice.ids)]
    assert (4 if rolling else 2) == len(updated)
    assert len(choice.spans) - 1 <= step.extra["resumed"]  # a part may have no token


async def test_the_calls_of_an_endpoint_end_at_the_other_one_while_it_is_updated(fleet, store):
    """The rest of each is sent there once its part has ended, and waits for nothing of the update, which waits for them all."""
    async with AsyncClient(fleet.url) as client, asyncio.timeout(120):
        first = await endpoint_of(fleet, "r1")
        engine, replies = fleet.engines[first], []
        engine.ends = [(5, "held")] * 3
        before = fleet.counts
        calls = [asyncio.create_task(fleet.call("r1", STREAM)) for _ in range(3)]
        while fleet.counts[first] < before[first] + 3 or not engine.held.is_set():
            await asyncio.sleep(0.01)

        async def update(endpoint):
            if endpoint["label"] == "ab"[first]:
                replies.extend(await asyncio.gather(*calls))

        await client.update_policy(2, update, rolling=True)
    steps = await wait_for_steps(store, "r1", 4)

    assert [(status, text_of(raw)) for status, raw in replies] == [(200, REPLY)] * 3
    assert ["ab"[1 - first]] * 3 == [step.engine.name for step in steps[1:]]
    assert {"ab"[first]} == {attempt["endpoint"] for step in steps[1:] for attempt in step.extra["attempts"]}


async def test_a_step_has_the_version_of_its_endpoint_in_a_rolling_update(fleet, store):
    """Until the policy's is announced."""
    async with AsyncClient(fleet.url) as client:
        await client.put_policy(1)
        first = await endpoint_of(fleet, "r1")
        await fleet.release("ab"[first], version=2)
        await fleet.call("r1")
        await client.put_policy(3)
        await fleet.call("r1")
    steps = await wait_for_steps(store, "r1", 3)

    assert [(step.policy_version, step.policy_version_end) for step in steps] == [("1", None), ("2", None), ("3", None)]
    assert [step.choices[0].spans[0].policy_version for step in steps] == ["1", "2", "3"]


def test_the_page_on_policies_lists_every_reason_for_which_a_call_is_not_resumed():
    """All of them, once."""
    page = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page.partition("| `reason` |")[2].partition("\n\n")[0], re.MULTILINE)

    assert {*get_args(Refusal)} == {*re.findall(r"`(\w+)`", ", ".join(rows))}
