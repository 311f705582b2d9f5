"""Agents that do anything, in modes, engines and processes that change: no call fails, and no prompt is wrong."""

import asyncio
import logging
from random import Random

import pytest
from tests.support.continued_calls import CHAT, served, tapped

TEXTS = ("Hi", "Go on.", "quote <|im_end|> here", "\n \n", "ünï")
# A template, the shape of the engine, its context window, and the rate of odd token splits.
ENGINES = (
    ("qwen3", "vllm", 32_768, 0.3),
    ("gptoss", "vllm", 32_768, 1.0),
    ("nemotron_3_nano", "sglang", 32_768, 0.3),
    ("qwen2_5", "vllm", 700, 0.0),
)


def options(random) -> dict:
    """The fields of a call."""
    fields = {}
    if random.random() < 0.3:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    for chance, more in (
        (0.2, {"max_tokens": random.choice([1, 2, 5, 30])}),
        (0.1, {"stop": random.choice([["."], ["\n", " the"]])}),
        (0.1, {"n": 2}),
        (0.05, {"parallel_tool_calls": False}),
        (0.05, {"include_reasoning": False}),
        (0.05, {"ignore_eos": True, "max_tokens": 20}),
        (0.05, {"stop_token_ids": [random.randrange(300)]}),
    ):
        if random.random() < chance:
            fields |= more
    return fields


async def turn(agent, random) -> bool:
    """Make a call, or abort it; return whether it was answered."""
    agent.stream, agent.fields = random.random() < 0.4, options(random)
    mode = random.choice(["off", "faithful", "append"])
    agent.headers = {"X-Rollout-Continuation": mode} if random.random() < 0.2 else {}
    messages = agent.messages
    if random.random() < 0.1 and len(messages) > 3:
        del messages[random.randrange(2, len(messages)) :]
    if messages and messages[-1].get("tool_calls"):
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "<|im_end|>"} for call in messages[-1]["tool_calls"]
        ]
        messages += results
    elif not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": random.choice(TEXTS)})
    call = asyncio.create_task(agent.call())
    if random.random() < 0.05:
        await asyncio.sleep(random.random() * 0.03)
        call.cancel()
        await asyncio.wait([call])
        if call.cancelled():
            return False
    response = await call
    assert agent.statuses[-1] < 500, response
    if agent.statuses[-1] == 200 and response["choices"]:
        agent.keep(random.choice(response["choices"])["message"])
    else:
        messages.pop()
    if random.random() < 0.05 and messages:
        messages[-1]["content"] += "x"
    return True


@pytest.mark.parametrize("number", range(len(ENGINES)), ids=lambda number: ENGINES[number][0])
async def test_random_agents_lose_no_step_and_get_no_wrong_prompt(store, caplog, number):
    """Two processes, six agents in three rollouts; the engine's faults come and go."""
    name, shape, window, rate = ENGINES[number]
    sections = {
        "continuation": {"mode": ("faithful", "append")[number % 2]},
        "agents": {"rollout_cache_bytes": (0, 10_000, 2**28)[number % 3]},
    }
    async with (
        tapped(template=name, shape=shape, max_model_len=window, noncanonical_rate=rate) as engine,
        served(store, engine=engine, sections=sections) as one,
        served(store, engine=engine, sections=sections) as other,
    ):
        answered = dict.fromkeys(("r0", "r1", "r2"), 0)

        async def run(agent, random):
            for _ in range(7):
                agent.served = random.choice((one, other))
                if random.random() < 0.05:
                    engine.options.faults.prompt_ids = random.choice(["rejected", "ignored", "changed", *[None] * 7])
                    engine.options.faults.tokenize = random.choice([500, *[None] * 3])
                answered[agent.rollout] += await turn(agent, random)

        agents = [one.agent(f"r{index // 2}", tools=index % 2 == 0) for index in range(6)]
        await asyncio.gather(*(run(agent, Random(10 * number + index)) for index, agent in enumerate(agents)))
        steps = {rollout: await one.steps(rollout) for rollout in answered}
        counts = await one.counts() + await other.counts()

    assert len(engine.raw(CHAT)) > 30
    assert all(len(steps[rollout]) >= count for rollout, count in answered.items())
    assert counts["refused:internal"] == 0
    assert counts.total() > 10
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
