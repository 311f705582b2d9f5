"""examples/trl_rollout_func.py: what TRL's GRPOTrainer requests and expects."""

import asyncio
from types import SimpleNamespace

import pytest
import trl_rollout_func

from tokentape import AsyncClient

KEYS = ["prompt_ids", "completion_ids", "logprobs", "env_mask", "reward"]


async def test_it_returns_a_row_for_each_prompt_in_order(simulated, run):
    """Run as a program: sampled tokens and their logprobs, a mask over the agent's own text in between, a reward."""
    url, _ = simulated
    result, output = await run(trl_rollout_func.main, "--url", url)
    async with AsyncClient(url) as client:
        rollouts = {rollout["rollout_id"]: rollout async for rollout in client.rollouts()}
        steps = {name: [step async for step in client.steps(name)] for name in rollouts}
        queued = (await client.claim_batch(consumer="late", groups=9))["groups"]

    assert [len(result[key]) for key in KEYS] == [4] * 5
    assert len(output.splitlines()) == 5
    taken = {tuple(calls[0]["prompt_ids"]): [] for calls in steps.values()}
    for calls in steps.values():
        taken[tuple(calls[0]["prompt_ids"])].append([token for step in calls for token in step["choices"][0]["ids"]])
    for prompt, ids, logprobs, mask, reward in zip(*(result[key] for key in KEYS), strict=True):
        trained = [token for token, is_sampled in zip(ids, mask, strict=True) if is_sampled]
        assert trained in taken[tuple(prompt)]
        assert all(logprob < 0 for logprob, is_sampled in zip(logprobs, mask, strict=True) if is_sampled)
        assert 0 in mask
        assert 0 < reward <= 1
    assert result["prompt_ids"][0] == result["prompt_ids"][1] != result["prompt_ids"][2] == result["prompt_ids"][3]
    assert sorted(
        sum(rollout["group_id"] == name for rollout in rollouts.values())
        for name in {rollout["group_id"] for rollout in rollouts.values()}
    ) == [2, 2]
    assert queued == []


async def test_new_weights_are_pushed_and_announced_once_a_step(simulated):
    """Not before the first step, and not twice for the same step."""
    url, _ = simulated
    pushed = []
    trainer = SimpleNamespace(num_generations=1, state=SimpleNamespace(global_step=0))

    async def solve(agent, prompt):
        await agent.chat.completions.create(model="policy", messages=prompt, max_tokens=4)
        return 1.0

    rollout_func = trl_rollout_func.make_rollout_func(url, solve, push=lambda of: pushed.append(of.state.global_step))
    async with AsyncClient(url) as client:
        for step, announced in [(0, "0"), (1, "1"), (1, "1"), (2, "2")]:
            trainer.state.global_step = step
            await asyncio.to_thread(rollout_func, [[{"role": "user", "content": "Hello"}]], trainer)
            assert announced == str((await client.policy())["version"])

    assert pushed == [1, 2]


async def test_of_several_sequences_the_last_is_trained(simulated):
    """An agent that starts over leaves two; the rewarded one is returned."""
    url, _ = simulated

    async def solve(agent, prompt):
        for content, most_tokens in (("First", 9), ("Second", 3)):
            messages = [{"role": "user", "content": content}]
            await agent.chat.completions.create(model="policy", messages=messages, max_tokens=most_tokens)
        return 1.0

    trainer = SimpleNamespace(num_generations=1, state=SimpleNamespace(global_step=0))
    result = await asyncio.to_thread(trl_rollout_func.make_rollout_func(url, solve), ["Hello"], trainer)

    assert result["env_mask"] == [[1, 1, 1]]


async def test_a_rollout_without_a_row_is_an_error(simulated):
    """TRL requires a row for each prompt: an agent without calls raises an error that names its rollout."""
    url, _ = simulated

    async def solve(agent, prompt):
        return 1.0

    rollout_func = trl_rollout_func.make_rollout_func(url, solve)
    trainer = SimpleNamespace(num_generations=1, state=SimpleNamespace(global_step=0))
    with pytest.raises(RuntimeError, match="TRL takes one row a rollout, and [0-9a-f]+ has 0: see http://.*/tree"):
        await asyncio.to_thread(rollout_func, ["Hello"], trainer)


async def test_an_agent_that_fails_is_tried_again_and_a_prompt_without_a_row_is_not_trained(simulated):
    """Its rollouts are finished as failed; the other prompts are trained."""
    url, _ = simulated
    attempts = []

    async def solve(agent, prompt):
        attempts.append(prompt)
        if prompt == "bad" or len(attempts) == 1:
            raise ValueError("the agent failed")
        await agent.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}], max_tokens=3
        )
        return 1.0

    trainer = SimpleNamespace(num_generations=1, state=SimpleNamespace(global_step=0))
    rows = await asyncio.to_thread(trl_rollout_func.make_rollout_func(url, solve), ["good", "bad", "fine"], trainer)
    async with AsyncClient(url) as client:
        statuses = [rollout["status"] async for rollout in client.rollouts()]

    assert [any(mask) for mask in rows["env_mask"]] == [True, False, True]
    assert tuple(statuses.count(status) for status in ("completed", "failed", "open")) == (2, 4, 0)
