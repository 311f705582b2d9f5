"""The cost of continuing long prompts: the event loop is not blocked, and the memory of the cache is what it counts."""

import asyncio
import gc
import tracemalloc

import orjson
import pytest
from aiohttp import web
from tests.support.continued_calls import CHAT, DETOKENIZE, TOKENIZE, Served, continuations, served, tapped
from tests.support.loop_watch import watched_proxy
from tests.support.stored import stored_steps

from proxy.continuation.turns import Turns
from proxy.rollouts import rollout

TOKENS = 200_000
LONGEST_S = 0.02  # of CPU time, on a slow machine


@pytest.fixture
async def long_engine():
    """An engine with prompts of 200,000 tokens; it renders the sampled turns with other ids."""
    async with tapped() as engine:
        prompt = list(range(1, TOKENS))

        async def chat(body):
            ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or prompt
            turn = len(body["messages"])
            sampled = [10, 11, turn, 2]
            content = [{"token": f"token_id:{i}", "logprob": -1.0, "bytes": None, "top_logprobs": []} for i in sampled]
            choice = {
                "index": 0, "message": {"role": "assistant", "content": f"a {turn}"}, "finish_reason": "stop",
                "stop_reason": None, "token_ids": sampled, "logprobs": {"content": content},
            }  # fmt: skip
            usage = {"prompt_tokens": len(ids), "completion_tokens": 4, "total_tokens": len(ids) + 4}
            head = {"id": "x", "object": "chat.completion", "created": 1, "model": "simulated"}
            return response({**head, "choices": [choice], "usage": usage, "prompt_token_ids": ids})

        async def tokenize(body):
            turns = (len(body["messages"]) - 1) // 2
            ids = prompt + [token for turn in range(turns) for token in (12, 13, 2, 7, 8)]
            return response({"tokens": ids, "count": len(ids), "max_model_len": 10**6})

        async def detokenize(body):
            return response(
                {"prompt": "".join({10: "a b", 12: "a b", 2: "<end>"}.get(token, "") for token in body["tokens"])}
            )

        engine.faults |= {CHAT: chat, TOKENIZE: tokenize, DETOKENIZE: detokenize}
        yield engine


def response(value):
    """JSON, encoded fast."""
    return web.Response(body=orjson.dumps(value), content_type="application/json")


async def test_a_long_prompt_does_not_block_the_event_loop(long_engine, server, store, http):
    """Neither its rendering, nor the comparison, nor the sending: each callback takes milliseconds of CPU at most."""
    settings = {"store": {"prefix": store._store.layout.prefix}, "continuation": {"mode": "append"}}
    async with watched_proxy(long_engine.url, f"unix:{server.socket}", **settings) as proxy:
        through = Served(proxy.url, http, long_engine, store, None)
        agent = through.agent("r1")
        await agent.turn("word " * 100_000)
        await agent.turn("Warm.")
        await proxy.reset()
        await agent.turn("word " * 1000)
        await asyncio.sleep(0.5)
        measured = await proxy.measured()
        steps = await through.steps("r1")

    assert continuations(steps) == [None, "sent", "sent"]
    assert all(step.exact for step in steps)
    assert measured.longest_s < LONGEST_S, measured.longest


@pytest.mark.parametrize("words", [3, 1500], ids=["short", "long"])
async def test_the_memory_of_turns_is_about_what_is_counted(store, words):
    """For rollouts of short and of long prompts with tool calls, within a factor of two."""
    async with served(store, template="qwen3", sections={"continuation": {"mode": "append"}}) as proxy:
        agent = proxy.agent("r1", tools=True)
        agent.messages = [{"role": "system", "content": "word " * words}]
        await agent.turns(6)
    kept = [Turns()]
    for step in await stored_steps(store, "r1"):
        kept[0].add(step)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            kept.append(Turns())
            for step in await stored_steps(store, "r1"):
                kept[-1].add(step)
        del step
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sum(turns.size + turns.conversations.newest.size + rollout._BYTES_PER_TURNS for turns in kept[1:])

    assert counted / 2 < used < 2 * counted, (used, counted)
