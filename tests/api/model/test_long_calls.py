"""Long calls: what repeats the rollout's previous call is compared, and costs no thread."""

import asyncio
from unittest.mock import patch

import orjson
import pytest
from aiohttp import web
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps

from proxy.protocols import number_lists

RESPONSE = orjson.loads(load("chat_ids_lp").response)
CHAT = "/rollouts/r1/v1/chat/completions"
IDS = list(range(100_000, 200_000))


def body(*texts: str) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text} for text in texts]}


@pytest.fixture
def long_engine(engine):
    """An engine that returns 50,000 prompt ids for each message."""

    async def respond(request: web.Request, body: dict) -> web.Response:
        prompt = IDS[: 50_000 * len(body["messages"])]
        return web.Response(
            body=orjson.dumps({**RESPONSE, "prompt_token_ids": prompt}), content_type="application/json"
        )

    engine.respond = respond
    return engine


async def test_a_call_that_repeats_the_previous_one_is_processed_on_the_event_loop(store, long_engine, http):
    """Its body is 400 kB, its response 350 kB: parsed, planned, verified and encoded without a thread."""
    task = "a word " * 60_000
    async with proxying(long_engine.url, store) as served:
        async with http.post(served.url + CHAT, json=body(task)) as response:
            assert 200 == response.status
        with patch("proxy.upstream.concurrency.asyncio.to_thread", side_effect=asyncio.to_thread) as threads:
            async with http.post(served.url + CHAT, json=body(task)) as response:
                assert 200 == response.status
            assert [] == threads.mock_calls
            async with http.post(served.url + CHAT, json=body("b" + task)) as response:
                assert 200 == response.status
            assert threads.mock_calls

    assert [IDS[:50_000]] * 3 == [step.prompts[0].tolist() for step in await stored_steps(store, "r1")]


async def test_calls_that_arrive_together_parse_their_prompt_once(store, long_engine, http):
    """Those after the first one compare it; one that differs is parsed."""
    with patch.object(number_lists, "pack_numbers", side_effect=number_lists.pack_numbers) as packed:
        async with proxying(long_engine.url, store) as served:

            async def call(*texts: str) -> None:
                async with http.post(served.url + CHAT, json=body(*texts)) as response:
                    assert 200 == response.status

            await asyncio.gather(*(call("a" * 300_000) for _ in range(4)))
            parsed = sum(len(args[0]) for args, _ in packed.call_args_list)
            await asyncio.gather(*(call("a" * 300_000, "b") for _ in range(4)))

    sampled = 4 * len(RESPONSE["choices"][0]["token_ids"])
    assert 50_000 + sampled == parsed
    assert 100_000 + 2 * sampled == sum(len(args[0]) for args, _ in packed.call_args_list)
    steps = await stored_steps(store, "r1")
    assert 4 * [IDS[:50_000]] + 4 * [IDS] == [step.prompts[0].tolist() for step in steps]
