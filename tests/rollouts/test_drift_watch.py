"""Texts of drift are looked up while steps are stored, so that kinds do not depend on the engine at the finish."""

import asyncio
from contextlib import AsyncExitStack

from tests.support.drifting_engine import ASK, MORE, REPLY, Drifting, same, unavailable, wait_for_texts
from tests.support.fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

# The first turn is cut within its last character, which vLLM does not return; the parser adds spaces to the call's arguments.
TURNS = [Turn(say="It rains 😀"), Turn(call=[ScriptedCall("look", '{"city":"Oslo"}')]), Turn(say="Done.")]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def chat(http, url: str, messages: list[dict], **fields) -> list[dict]:
    """Make a call of the rollout `r1`; return the messages that continue it."""
    body = {"model": "simulated", "messages": messages, "tools": [LOOK], **fields}
    async with http.post(f"{url}/rollouts/r1/v1/chat/completions", json=body) as response:
        reply = (await response.json())["choices"][0]["message"]
    calls = reply.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    message = {name: reply[name] for name in ("role", "content", "tool_calls") if reply.get(name)}
    return [*messages, message, *(results or [MORE])]


async def test_kinds_are_the_same_if_the_engine_stops_before_the_finish(store, http):
    """The texts are stored with the rollout, and any replica uses them."""
    async with AsyncExitStack() as stack:
        alive = await stack.enter_async_context(AsyncExitStack())
        url = await alive.enter_async_context(
            simulating("127.0.0.1:0", Options(seed=1, script=Script([Conversation(TURNS)])))
        )
        rendering = {"continuation": {"mode": "off"}}  # by the engine, so that there is drift
        first = await stack.enter_async_context(proxying(url, store, **rendering))
        other = await stack.enter_async_context(proxying(url, store, **rendering))
        messages = await chat(http, first.url, [ASK], max_tokens=8)
        messages = await chat(http, first.url, messages)
        await chat(http, first.url, messages)
        await wait_for_texts(store, 2)
        await alive.aclose()
        rollout = Drifting(http, other.url)
        await rollout.finish()
        await rollout.counted(retokenized=1, tool_call_rewritten=1)

        assert [drift["kind"] for drift in (await rollout.get("/tree"))["drift"]] == [
            "retokenized",
            "tool_call_rewritten",
        ]


async def test_an_unexplained_boundary_is_explained_by_a_later_read(rollout, store, drifting, caplog):
    """Missing texts are logged; the kind is counted once."""
    drifting.detokenize = unavailable
    await rollout.two_turns()
    await rollout.finish()
    await rollout.counted(unexplained=1)
    unknown = [await rollout.metric(kind) for kind in ("unexplained", "other", "retokenized")]
    drifting.detokenize = same
    await rollout.counted(retokenized=1)
    async with asyncio.timeout(50):  # the metric follows the count in the store
        while await rollout.metric("retokenized") != 1:
            await asyncio.sleep(0.005)

    assert unknown == [0, 0, 0]
    assert "Kind of drift not known yet: engine fake did not return the texts" in caplog.text


async def test_lookups_of_texts_delay_neither_calls_nor_the_shutdown(store, drifting, http, monkeypatch):
    monkeypatch.setattr("proxy.rollouts.drift._CLOSE_TIMEOUT_S", 0.01)
    drifting.gate.clear()
    async with asyncio.timeout(50):
        async with proxying(drifting.url, store) as served:
            rollout = Drifting(http, served.url)
            await rollout.two_turns()
            while not drifting.detokenized:
                await asyncio.sleep(0.005)
            await rollout.two_turns()
        drifting.gate.set()

    assert await store.marks("r1") == {}


async def test_the_number_of_waiting_lookups_is_limited(rollout, drifting, monkeypatch):
    """The others are looked up at the finish."""
    monkeypatch.setattr("proxy.rollouts.drift._MAX_WAITING", 0)
    drifting.detokenize = same
    await rollout.two_turns()
    await rollout.chat(ASK)
    lookups = len(drifting.detokenized)
    await rollout.finish()
    await rollout.counted(retokenized=1)

    assert (lookups, len(drifting.detokenized)) == (0, 2)


async def test_a_retry_reuses_the_texts_of_the_first_attempt(rollout, store, drifting):
    drifting.detokenize = same
    await rollout.two_turns()
    await wait_for_texts(store, 1)
    await rollout.chat(ASK)
    await rollout.chat(ASK, REPLY, MORE)
    await rollout.finish()
    await rollout.counted(retokenized=2)

    assert len(drifting.detokenized) == 2


async def test_a_call_of_another_policy_does_not_continue_an_earlier_one(store, drifting, http):
    """Its prompt has the reply as its own chat template renders it: there is no drift and nothing to look up."""
    drifting.detokenize = same
    async with proxying(drifting.url, store, policies={"judge": {"models": ["judge"]}}) as served:
        rollout = Drifting(http, served.url)
        await rollout.chat(ASK)
        await rollout.post("/v1/chat/completions", {"model": "judge", "messages": [ASK, REPLY, MORE]})
        await rollout.finish()

        assert (drifting.detokenized, (await rollout.get("/tree"))["drift"]) == ([], [])
