"""Engines with faults: an exact step has the sampled ids and logprobs, for any fault in the response."""

from contextlib import suppress
from dataclasses import replace
from random import Random
from secrets import token_hex

import aiohttp
import orjson
import pytest
from hypothesis import strategies as st
from tests.support.all_readers import Failed, Readers
from tests.support.faulty_calls import FaultyCall, describe, drawn, least
from tests.support.faulty_oracle import LONGEST_S, complaint, recorded, right
from tests.support.faulty_sessions import Agent
from tests.support.loop_watch import watched_proxy
from tests.support.raw_engine import raw_engine
from tests.support.recorded import dialect_cassettes, http_cassettes

from proxy.protocols.response import EventParser

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SEEDS = st.integers(0, 2**24 - 1)
LISTED_EVERY = 10


async def test_a_correct_response_is_exact(fuzz):
    """The model of engines writes responses without a flag, so a flag below is due to the injected fault."""

    def check(seed):
        call = replace(drawn(seed), faults=(), cut=None, over=False)
        step = recorded(call, call.plan())
        # Of several choices llama.cpp counts one, and SGLang's streamed completions count their sum.
        live = call.kind == "sglang" and call.dialect == "completions" and call.plan().framing == "live"
        uncounted = (call.kind == "llamacpp" or live) and len(call.truth.choices) > 1
        assert right(step, call) or uncounted, describe(call, call.plan())
        assert step.exact or uncounted, (step.problems, describe(call, call.plan()))

    await fuzz(0.05, SEEDS.filter(lambda seed: not drawn(seed).over), check)


def key_paths(value, path=()) -> set[tuple]:
    """Return the paths of all keys within a value, ignoring list indices."""
    if isinstance(value, list):
        return set().union(*(key_paths(inner, path) for inner in value))
    if not isinstance(value, dict):
        return set()
    return set().union(*({(*path, key)} | key_paths(inner, (*path, key)) for key, inner in value.items()))


def response_key_paths(text: bytes, *, is_stream: bool) -> set[tuple]:
    if not is_stream:
        return key_paths(orjson.loads(text))
    payloads = [event.payload for event in EventParser().feed(text)]
    return set().union(*(key_paths(orjson.loads(payload)) for payload in payloads if payload[:1] == b"{"))


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_the_model_writes_only_recorded_fields(kind):
    """Each key of its responses occurs at the same path in a cassette."""
    seen: dict[tuple, set] = {}
    cassettes = http_cassettes(kind) if kind == "llamacpp" else dialect_cassettes(kind)
    for cassette in cassettes:
        if cassette.status == 200 and not (cassette.is_stream and b'"error"' in cassette.response):
            endpoint = (cassette.path, cassette.is_stream)
            seen.setdefault(endpoint, set()).update(response_key_paths(cassette.response, is_stream=cassette.is_stream))
    for seed in range(600):
        call = replace(drawn(seed), faults=(), cut=None, end=b"\n\n")
        text, content_type = call.response_to(call.plan().body)
        is_stream = content_type.startswith("text/event-stream")
        if call.kind == kind and (call.path, is_stream) in seen:
            written = response_key_paths(text, is_stream=is_stream) - seen[call.path, is_stream]
            written -= {path for path in written if path[-1].startswith((" t", "token_id:"))}  # tokens, not field names
            # Not every recorded stream requested these.
            written -= {path for path in seen[call.path, False] if path[0] in ("usage", "__verbose")}
            assert sorted(written) == [], (call.path, is_stream)


async def test_an_exact_step_never_differs_from_what_was_sampled(fuzz):
    """A fault is flagged or harmless; no exception, no slow part of an exchange, no reader that fails."""

    def check(seed):
        call = drawn(seed)
        if (first := complaint(call)) is not None:
            call = least(call, lambda smaller: complaint(smaller) is not None)
            pytest.fail(f"{first}\n{complaint(call)}\n{describe(call, call.plan())}")

    await fuzz(0.9, SEEDS, check)


def first_call(seed: int, kind: str) -> FaultyCall:
    """Return the first call of this engine type, searching from a seed."""
    return next(call for call in map(drawn, range(seed * 100, seed * 100 + 100)) if call.kind == kind)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
async def test_a_faulty_engine_breaks_no_reader(fuzz, server, kind):
    """With a real proxy: no 500, no response without an end, no inexact step marked exact, no slow callback."""
    prefix = token_hex(8)
    async with (
        raw_engine(kind) as engine,
        watched_proxy(engine.url, f"unix:{server.socket}", store={"prefix": prefix}) as proxy,
        aiohttp.ClientSession() as http,
    ):
        readers, agent = Readers(http, proxy.url), Agent(http, proxy.url, engine)
        number, failures = 0, []
        await agent.call("warm", replace(first_call(0, kind), faults=()), Random(1))
        await readers.all_formats("warm")  # so that slow imports happen once, before
        await proxy.reset()

        async def check(seed):
            nonlocal number
            if failures:  # with earlier cases in the proxy, it would not fail again in the same way
                return
            number += 1
            random = Random(seed)
            calls = [first_call(seed, kind)] + [first_call(seed + 1, kind)] * (random.random() < 0.3)
            try:
                await session(readers, agent, calls, random, group=f"g{number}")
                if number % LISTED_EVERY == 0:
                    await readers.lists(random)
                longest = await proxy.measured()
                if longest.longest_s > LONGEST_S:
                    await proxy.reset()
                    raise Failed(f"a callback of {longest.longest_s:.3f} s of CPU: {longest.longest}")
            except Failed as failed:
                described = "\n".join(f"{describe(call, call.plan())}" for call in calls)
                failures.append(f"seed {seed} of {kind}, group g{number}: {failed}\n{described}")

        await fuzz(0.004, SEEDS, check)
        assert failures == [], failures[0]
        await readers.lists(Random(0))


async def session(readers: Readers, agent: Agent, calls: list[FaultyCall], random: Random, *, group: str) -> None:
    """Record a group of two rollouts, one with these calls and one with a good call; read, finish, claim and delete it."""
    members = [f"{group}-{index}" for index in range(2)]
    opened = [{"rollout_id": member, "group_id": group} for member in members]
    for body in opened:
        await readers.request("POST", "/rollouts", body)
    for call in calls:
        others = (
            (None, None, "messages", "responses", "gemini")
            if call.dialect == "chat" and len(call.truth.choices) == 1
            else (None,)
        )
        step_id = await agent.call(members[0], call, random, dialect=random.choice(others))
        await agent.judge(readers, members[0], step_id, call)
    await readers.rollout(members[0], random)
    for member in members:
        await readers.request("POST", f"/rollouts/{member}/finish", {"status": "completed", "reward": random.random()})
    await readers.group(group, random)
    await readers.claim(random)
    with suppress(KeyError):
        await readers.request("DELETE", f"/groups/{group}")
