"""Engines that err: an exact step has the ids and logprobs that were sampled, whatever the engine does to its answer."""

from contextlib import suppress
from dataclasses import replace
from random import Random
from secrets import token_hex

import aiohttp
import orjson
import pytest
from all_readers import Failed, Readers
from faulty_calls import FaultyCall, drawn, least, told
from faulty_oracle import LONGEST_S, complaint, recorded, right
from faulty_sessions import Agent
from hypothesis import strategies as st
from loop_watch import watched_proxy
from raw_engine import raw_engine
from recorded import dialect_cassettes, http_cassettes

from proxy.wire.sse import EventCutter

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SEEDS = st.integers(0, 2**24 - 1)
LISTED_EVERY = 10


async def test_a_right_answer_is_exact(fuzz):
    """The model of engines writes what TokenTape takes for right: so what is flagged below is flagged for its fault."""

    def check(seed):
        call = replace(drawn(seed), faults=(), cut=None, over=False)
        step = recorded(call, call.plan())
        # Of several choices llama.cpp counts one, and a stream of SGLang's completions their sum.
        live = call.kind == "sglang" and call.dialect == "completions" and call.plan().framing == "live"
        uncounted = (call.kind == "llamacpp" or live) and len(call.truth.choices) > 1
        assert right(step, call) or uncounted, told(call, call.plan())
        assert step.exact or uncounted, (step.problems, told(call, call.plan()))

    await fuzz(0.05, SEEDS.filter(lambda seed: not drawn(seed).over), check)


def keys_of(value, path=()) -> set[tuple]:
    """The paths of all keys of objects within a value, whatever the place in a list."""
    if isinstance(value, list):
        return set().union(*(keys_of(inner, path) for inner in value))
    if not isinstance(value, dict):
        return set()
    return set().union(*({(*path, key)} | keys_of(inner, (*path, key)) for key, inner in value.items()))


def keys_of_answer(text: bytes, *, is_stream: bool) -> set[tuple]:
    if not is_stream:
        return keys_of(orjson.loads(text))
    payloads = [event.payload for event in EventCutter().feed(text)]
    return set().union(*(keys_of(orjson.loads(payload)) for payload in payloads if payload[:1] == b"{"))


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_the_model_writes_what_engines_were_seen_to_write(kind):
    """Each key of its answers is, in its place, in an answer that was recorded."""
    seen: dict[tuple, set] = {}
    cassettes = dialect_cassettes() if kind == "vllm" else http_cassettes(kind)
    for cassette in cassettes:
        if cassette.status == 200 and not (cassette.is_stream and b'"error"' in cassette.answer):
            place = (cassette.path, cassette.is_stream)
            seen.setdefault(place, set()).update(keys_of_answer(cassette.answer, is_stream=cassette.is_stream))
    for seed in range(600):
        call = replace(drawn(seed), faults=(), cut=None, end=b"\n\n")
        text, content_type = call.answer_to(call.plan().body)
        is_stream = content_type.startswith("text/event-stream")
        if call.kind == kind and (call.path, is_stream) in seen:
            written = keys_of_answer(text, is_stream=is_stream) - seen[call.path, is_stream]
            written -= {
                path for path in written if path[-1].startswith((" t", "token_id:"))
            }  # tokens, not names of fields
            # Not every stream was asked for these when it was recorded.
            written -= {path for path in seen[call.path, False] if path[0] in ("usage", "__verbose")}
            assert [] == sorted(written), (call.path, is_stream)


async def test_no_exact_step_differs_from_what_was_sampled(fuzz):
    """A fault is flagged, or harmless; nothing is raised, no part of an exchange takes long, and readers bear the step."""

    def check(seed):
        call = drawn(seed)
        if (first := complaint(call)) is not None:
            call = least(call, lambda smaller: complaint(smaller) is not None)
            pytest.fail(f"{first}\n{complaint(call)}\n{told(call, call.plan())}")

    await fuzz(0.9, SEEDS, check)


def call_of(seed: int, kind: str) -> FaultyCall:
    """The first call of this kind of engine, from a seed on."""
    return next(call for call in map(drawn, range(seed * 100, seed * 100 + 100)) if call.kind == kind)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
async def test_a_faulty_engine_fails_no_reader(fuzz, server, kind):
    """Through a real proxy: no 500, no answer without an end, no step that claims too much, no long callback."""
    prefix = token_hex(8)
    async with (
        raw_engine(kind) as engine,
        watched_proxy(engine.url, f"unix:{server.socket}", store={"prefix": prefix}) as proxy,
        aiohttp.ClientSession() as http,
    ):
        readers, agent = Readers(http, proxy.url), Agent(http, proxy.url, engine)
        number, failures = 0, []
        await agent.call("warm", replace(call_of(0, kind), faults=()), Random(1))
        await readers.all_formats("warm")  # what is imported then takes long, once
        await proxy.reset()

        async def check(seed):
            nonlocal number
            if failures:  # a proxy that holds earlier cases would not fail the same way again
                return
            number += 1
            random = Random(seed)
            calls = [call_of(seed, kind)] + [call_of(seed + 1, kind)] * (random.random() < 0.3)
            try:
                await session(readers, agent, calls, random, group=f"g{number}")
                if number % LISTED_EVERY == 0:
                    await readers.lists(random)
                longest = await proxy.measured()
                if longest.longest_s > LONGEST_S:
                    await proxy.reset()
                    raise Failed(f"a callback of {longest.longest_s:.3f} s of CPU: {longest.longest}")
            except Failed as failed:
                asked = "\n".join(f"{told(call, call.plan())}" for call in calls)
                failures.append(f"seed {seed} of {kind}, group g{number}: {failed}\n{asked}")

        await fuzz(0.004, SEEDS, check)
        assert [] == failures, failures[0]
        await readers.lists(Random(0))


async def session(readers: Readers, agent: Agent, calls: list[FaultyCall], random: Random, *, group: str) -> None:
    """A group of two rollouts: one of these calls, one of a call without faults; read, finished, claimed and deleted."""
    members = [f"{group}-{at}" for at in range(2)]
    opened = [{"rollout_id": member, "group_id": group} for member in members]
    for body in opened:
        await readers.ask("POST", "/rollouts", body)
    for call in calls:
        others = (
            (None, None, "messages", "responses")
            if call.dialect == "chat" and len(call.truth.choices) == 1
            else (None,)
        )
        step_id = await agent.call(members[0], call, random, dialect=random.choice(others))
        await agent.judge(readers, members[0], step_id, call)
    await readers.rollout(members[0], random)
    for member in members:
        await readers.ask("POST", f"/rollouts/{member}/finish", {"status": "completed", "reward": random.random()})
    await readers.group(group, random)
    await readers.claim(random)
    with suppress(KeyError):
        await readers.ask("DELETE", f"/groups/{group}")
