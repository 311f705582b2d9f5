"""Long calls: what repeats the rollout's previous call is compared, and costs no thread."""

import asyncio
from unittest.mock import patch

import orjson
import pytest
from aiohttp import web
from tests.support.recorded import load
from tests.support.session import CHAT, session_with
from tests.support.stored import stored_steps

from proxy.protocols import json_texts

RESPONSE = orjson.loads(load("chat_ids_lp").response)
IDS = list(range(100_000, 200_000))


def body(*texts: str) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text} for text in texts]}


@pytest.fixture
def long_engine(engine):
    """An engine that returns 50,000 prompt ids for each message."""

    async def respond(request: web.Request, body: dict) -> web.Response:
        prompt = IDS[: 50_000 * len(body["messages"])]
        return web.Response(
            content_type="application/json", body=orjson.dumps({**RESPONSE, "prompt_token_ids": prompt})
        )

    engine.respond = respond
    return engine


async def test_a_call_that_repeats_the_previous_one_is_processed_on_the_event_loop(store, long_engine):
    """Its body is 400 kB, its response 350 kB: parsed, planned, verified and encoded without a thread."""
    task = "a word " * 60_000
    async with session_with(long_engine, store) as session:
        assert (await session.post(CHAT, body(task))).status == 200
        with patch("proxy.upstream.concurrency.asyncio.to_thread", side_effect=asyncio.to_thread) as threads:
            assert (await session.post(CHAT, body(task))).status == 200
            assert threads.mock_calls == []
            assert (await session.post(CHAT, body("b" + task))).status == 200
            assert threads.mock_calls

    assert [IDS[:50_000]] * 3 == [step.prompts[0].tolist() for step in await stored_steps(store, "r1")]


async def test_calls_that_arrive_together_parse_their_prompt_once(store, long_engine):
    """Those after the first one compare it; one that differs is parsed."""
    with patch.object(json_texts, "pack_numbers", side_effect=json_texts.pack_numbers) as packed:
        async with session_with(long_engine, store) as session:
            parsed = []
            for texts in (["a" * 300_000], ["a" * 300_000, "b"]):
                responses = await asyncio.gather(*(session.post(CHAT, body(*texts)) for _ in range(4)))
                assert [response.status for response in responses] == [200] * 4
                parsed.append(sum(len(args[0]) for args, _ in packed.call_args_list))

    sampled = 4 * len(RESPONSE["choices"][0]["token_ids"])
    assert parsed == [50_000 + sampled, 100_000 + 2 * sampled]
    steps = await stored_steps(store, "r1")
    assert 4 * [IDS[:50_000]] + 4 * [IDS] == [step.prompts[0].tolist() for step in steps]
