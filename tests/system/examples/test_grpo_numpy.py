"""examples/grpo_numpy.py: policy gradients from recorded rollouts of the policy that samples."""

import bigram_engine
import grpo_numpy
import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAIError
from tests.support.fakes import proxying

from tokentape import AsyncClient


async def test_the_reward_rises_while_agents_are_ahead_of_the_trainer(store, run, whole):
    """The recorded logprobs equal the logprobs of the recorded versions; some are older; the update lowers the loss."""
    cut = [] if whole else ["--steps", 12, "--groups", 2, "--size", 8, "--rate", 250]
    with bigram_engine.serving("127.0.0.1", 0, seed=7) as engine:
        async with proxying(engine, store) as served:
            lines, output = await run(grpo_numpy.main, "--url", served.url, "--engine", engine, *cut)
            async with AsyncClient(served.url) as client:
                groups = [group async for group in client.groups()]
                rows = [row async for row in client.export(format="sequences")]
                announced = (await client.policy())["version"]
    rewards = [line[1] for line in lines]

    assert len(output.splitlines()) == 1 + len(lines)
    assert max(line[4] for line in lines) < 1e-5
    assert all(after < before for _, _, before, after, *_ in lines[:2])
    assert max(rewards[-2:]) > (0.75 if whole else max(rewards[:2]) + 0.05), rewards
    assert {group["status"] for group in groups} == {"done"}
    assert list(range(len(lines))) == [line[0] for line in lines]
    assert any(line[6] > 0 for line in lines)
    assert {span["policy_version"] for row in rows for span in row["spans"]} <= {str(line[0]) for line in lines}
    assert str(len(lines)) == str(announced)
    assert sum(line[5] for line in lines) == sum(sum(row["mask"]) for row in rows)


def test_the_gradient_belongs_to_the_loss():
    """By finite differences, with and without clipping; only tokens of the mask count."""
    draws = np.random.default_rng(5)
    tokens = draws.integers(0, 28, size=40)
    row = {
        "token_ids": tokens.tolist(),
        "mask": [0] * 4 + [1] * 20 + [0] * 4 + [1] * 12,
        "logprobs": [None] * 4 + [-3.3] * 20 + [None] * 4 + [-3.4] * 12,
        "spans": [
            {"start": 4, "end": 24, "policy_version": "6", "owned": True},
            {"start": 28, "end": 40, "policy_version": "7", "owned": True},
        ],
    }
    groups = [{"data": [row | {"advantages": 1.5}, row | {"advantages": -1.0}]}]
    sampled = grpo_numpy.Sampled(groups)
    logits = draws.normal(scale=0.3, size=(28, 28))
    _, gradient, ratio = grpo_numpy.loss_of(logits, sampled)

    assert len(sampled.tokens) == 64
    assert sampled.versions.tolist() == ([6] * 20 + [7] * 12) * 2
    assert sampled.before[20] == tokens[27]
    assert (ratio > 1.2).any()
    assert (ratio < 0.8).any()
    for before, token in zip(sampled.before[:6], sampled.tokens[:6], strict=True):
        moved = [logits.copy(), logits.copy()]
        moved[0][before, token] += 1e-4
        moved[1][before, token] -= 1e-4
        up, down = (grpo_numpy.loss_of(table, sampled)[0] for table in moved)
        assert pytest.approx(gradient[before, token], abs=2e-5) == (up - down) / 2e-4


@pytest.mark.parametrize(
    ("words", "reward"),
    [(("bababababada", "abababababab"), 1.0), (("bababababada", ""), 0.5), (("aaaaaaaaaaaa", "b"), 0)],
)
def test_the_reward_counts_turns_between_consonants_and_vowels(words, reward):
    """Words that end early lose the missing ones."""
    assert reward == grpo_numpy.reward_of(words)


async def test_an_agent_that_fails_costs_its_group_one_rollout(store, run, monkeypatch):
    """Its rollout is finished by its deadline, and the loop ends with batches of all groups."""
    talk, failing = grpo_numpy.talk, iter([True])

    async def talk_or_fail(agent):
        if next(failing, False):
            raise OpenAIError("the agent failed")
        return await talk(agent)

    monkeypatch.setattr(grpo_numpy, "talk", talk_or_fail)
    monkeypatch.setattr(grpo_numpy, "LIMITS", {"deadline_s": 60.0, "idle_s": 1.0, "start_s": 1.0})
    cut = ["--steps", 2, "--groups", 1, "--size", 4]
    with bigram_engine.serving("127.0.0.1", 0, seed=7) as engine:
        async with proxying(engine, store) as served:
            lines, _ = await run(grpo_numpy.main, "--url", served.url, "--engine", engine, *cut)
            async with AsyncClient(served.url) as client:
                rollouts = [rollout async for rollout in client.rollouts()]

    assert len(lines) == 2
    assert sum(rollout["reward"] is not None for rollout in rollouts) == 7
    assert [rollout["reason"] for rollout in rollouts if rollout["status"] == "aborted"] == ["deadline"]


async def test_calls_resume_with_the_old_version_if_the_engine_is_unreachable(store):
    """The exception is raised, and nothing is announced."""
    with bigram_engine.serving("127.0.0.1", 0, seed=7) as engine:
        async with proxying(engine, store) as served, AsyncClient(served.url) as client:
            await client.put_policy(0)
            with pytest.raises(OSError, match="refused"):
                await grpo_numpy.push(client, "http://127.0.0.1:9", np.zeros((28, 28), np.float32), 1, "run")

            assert (await client.policy())["version"] == "0"
            group = await client.open_group(1)
            async with AsyncOpenAI(base_url=client.url, api_key="per rollout") as agents:
                await grpo_numpy.play(client, agents, group["rollouts"][0])
            assert (await client.group(group["group_id"]))["status"] == "complete"
