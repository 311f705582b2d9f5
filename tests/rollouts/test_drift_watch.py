"""Texts of drift are looked up as steps are stored: kinds do not depend on the engine being there at the finish."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from drifting_engine import ASK, MORE, REPLY, Drifting, DriftingEngine, same, unavailable, wait_for_texts
from fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

# Cut within its last character, which vLLM's clients are not shown; and a call whose arguments the parser writes with spaces.
TURNS = [Turn(say="It rains 😀"), Turn(call=[ScriptedCall("look", '{"city":"Oslo"}')]), Turn(say="Done.")]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def drifting(engine):
    """An engine whose second prompt lacks a token that it sampled."""
    return DriftingEngine(engine)


async def chat(http, url: str, messages: list[dict], **said) -> list[dict]:
    """The messages that go on from a call of the rollout `r1`."""
    body = {"model": "simulated", "messages": messages, "tools": [LOOK], **said}
    async with http.post(f"{url}/rollouts/r1/v1/chat/completions", json=body) as response:
        reply = (await response.json())["choices"][0]["message"]
    calls = reply.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    kept = {name: reply[name] for name in ("role", "content", "tool_calls") if reply.get(name)}
    return [*messages, kept, *(results or [MORE])]


async def test_an_engine_that_dies_before_the_finish_changes_no_kind(store, http):
    """What its texts showed is kept with the rollout: any replica counts the same, at the finish and in the tree."""
    async with AsyncExitStack() as stack:
        alive = await stack.enter_async_context(AsyncExitStack())
        url = await alive.enter_async_context(
            simulating("127.0.0.1:0", Options(seed=1, script=Script([Conversation(TURNS)])))
        )
        one = await stack.enter_async_context(proxying(url, store))
        other = await stack.enter_async_context(proxying(url, store))
        messages = await chat(http, one.url, [ASK], max_tokens=8)
        messages = await chat(http, one.url, messages)
        await chat(http, one.url, messages)
        await wait_for_texts(store, 2)
        await alive.aclose()
        rollout = Drifting(http, other.url)
        await rollout.finish()
        await rollout.counted(retokenized=1, tool_call_rewritten=1)

        assert ["retokenized", "tool_call_rewritten"] == [one["kind"] for one in (await rollout.get("/tree"))["drift"]]


async def test_what_could_not_be_looked_up_is_completed_by_a_later_look(store, drifting, http, caplog):
    """It is unexplained while the engine gives no texts, which is logged; counted by its kind, once, after it did."""
    drifting.detokenize = unavailable
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await rollout.finish()
        await rollout.counted(unexplained=1)
        unknown = [await rollout.metric(kind) for kind in ("unexplained", "other", "retokenized")]
        drifting.detokenize = same
        await rollout.counted(retokenized=1)

        assert [0, 0, 0] == unknown
        assert 1 == await rollout.metric("retokenized")
        assert "Kind of drift not known yet: engine fake did not return the texts" in caplog.text


async def test_no_call_and_no_stop_waits_for_texts(store, drifting, http, monkeypatch):
    """An engine that never gives them delays neither the next call of the rollout nor the end of the process."""
    monkeypatch.setattr("proxy.rollouts.drift_watch._CLOSE_TIMEOUT_S", 0.01)
    drifting.gate.clear()
    async with asyncio.timeout(50):
        async with proxying(drifting.url, store) as served:
            rollout = Drifting(http, served.url)
            await rollout.two_turns()
            while not drifting.detokenized:
                await asyncio.sleep(0.005)
            await rollout.two_turns()
        drifting.gate.set()

    assert {} == await store.marks("r1")


async def test_look_ups_that_wait_are_bounded(store, drifting, http, monkeypatch):
    """What is too much is left to the finish of the rollout."""
    monkeypatch.setattr("proxy.rollouts.drift_watch._MAX_WAITING", 0)
    drifting.detokenize = same
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await rollout.chat(ASK)
        asked = len(drifting.detokenized)
        await rollout.finish()
        await rollout.counted(retokenized=1)

        assert (0, 2) == (asked, len(drifting.detokenized))


async def test_a_step_that_is_asked_again_costs_no_second_look_up(store, drifting, http):
    """Retries drift as the first attempt did: the texts of the same ids are known."""
    drifting.detokenize = same
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await wait_for_texts(store, 1)
        await rollout.chat(ASK)
        await rollout.chat(ASK, REPLY, MORE)
        await rollout.finish()
        await rollout.counted(retokenized=2)

        assert 2 == len(drifting.detokenized)
