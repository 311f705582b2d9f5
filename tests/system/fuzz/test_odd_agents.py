"""Agents that send anything: a response in the dialect's shape, never a 500, and readers that handle the record."""

import asyncio
from copy import deepcopy
from random import Random
from secrets import token_hex

import aiohttp
import orjson
import pytest
from hypothesis import strategies as st
from tests.support.all_readers import Failed, Readers
from tests.support.faulty_calls import PATHS, drawn_truth, serialized
from tests.support.faulty_engine import EngineRequest, write_response
from tests.support.faulty_oracle import LONGEST_S
from tests.support.loop_watch import watched_proxy
from tests.support.odd_agents import CALL, Request, ask_raw, complaint_of, drawn_request
from tests.support.raw_engine import Sent, raw_engine

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SEEDS = st.integers(0, 2**24 - 1)
PATIENCE_S = 30
REFUSAL = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
DIALECTS = {path: dialect for dialect, path in PATHS.items()}


def respond(random: Random):
    """An engine that works, and rejects a call now and then."""

    async def respond(path: str, body: dict) -> Sent:
        if path in ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"):
            return Sent([b'{"count":2,"max_model_len":2048,"tokens":[5,6],"prompt":"a","text":"a"}'])
        if path not in DIALECTS or random.random() < 0.1:
            return Sent([REFUSAL], status=b"400 Bad Request")
        try:
            written = write_response(
                EngineRequest("vllm", DIALECTS[path], body), drawn_truth(random, body, DIALECTS[path]), random
            )
        except (AttributeError, TypeError, KeyError):
            return Sent([REFUSAL], status=b"400 Bad Request")
        return Sent([serialized(written)], "text/event-stream" if written.is_stream else "application/json")

    return respond


async def converse(url: str, rollout: str, random: Random) -> list[Request]:
    """Make some calls in one rollout, continuing the chat with each reply; return what was sent. Raises Failed."""
    sent, messages = [], None
    for _ in range(random.choice((1, 1, 2, 3))):
        request = drawn_request(random, rollout, messages)
        sent.append(request)
        try:
            async with asyncio.timeout(PATIENCE_S):
                response = await ask_raw(url, request)
        except TimeoutError:
            raise Failed(f"no end after {PATIENCE_S} s: {request}") from None
        except (ValueError, ConnectionError) as error:
            raise Failed(f"{error!r}: {request}") from error
        why = complaint_of(request, response)
        if why:
            raise Failed(f"{why}: {str(request)[:3_000]}")
        messages = continued(request, response.body, random) if random.random() < 0.7 else None
    return sent


def continued(request: Request, answered: bytes, random: Random) -> list | None:
    """Return the messages of a chat's next call: the previous ones, the reply, and a tool result."""
    try:
        before = orjson.loads(request.body)["messages"]
        reply = orjson.loads(answered)["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": "call-1", "content": "4"}
        return [*before, {**reply, "tool_calls": [deepcopy(CALL)]} if random.random() < 0.3 else reply, result]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None


async def test_no_request_of_an_agent_causes_a_500(fuzz, server):
    """With a real proxy: no response without an end, no slow callback, and every reader works."""
    async with (
        raw_engine("vllm") as engine,
        watched_proxy(engine.url, f"unix:{server.socket}", store={"prefix": token_hex(8)}) as proxy,
        aiohttp.ClientSession() as http,
    ):
        readers, number, failures = Readers(http, proxy.url), 0, []
        engine.respond = respond(Random(0))
        await converse(proxy.url, "warm", Random(0))
        await readers.all_formats("warm")
        await proxy.reset()

        async def check(seed):
            nonlocal number
            if failures:  # with earlier cases in the proxy, it would not fail again in the same way
                return
            number += 1
            random, rollout = Random(seed), f"r{number}"
            engine.respond = respond(random)
            try:
                await readers.request("POST", "/rollouts", {"rollout_id": rollout, "group_id": f"g{number}"})
                await converse(proxy.url, rollout, random)
                await readers.rollout(rollout, random)
                await readers.request("POST", f"/rollouts/{rollout}/finish", {"status": "completed", "reward": 1.0})
                await readers.group(f"g{number}", random)
                if number % 10 == 0:
                    await readers.claim(random)
                    await readers.lists(random)
                if number % 50 == 0:
                    for earlier in range(number - 50, number):
                        await readers.request("DELETE", f"/groups/g{earlier}")
                longest = await proxy.measured()
                if longest.longest_s > LONGEST_S:
                    await proxy.reset()
                    raise Failed(f"a callback of {longest.longest_s:.3f} s of CPU: {longest.longest}")
            except Failed as failed:
                failures.append(f"seed {seed}: {failed}")

        await fuzz(0.01, SEEDS, check)
        assert failures == [], failures[0]
