"""examples/grpo_numpy.py: policy gradients from recorded rollouts of the policy that samples."""

from types import SimpleNamespace

import bigram_engine
import grpo_numpy
import numpy as np
import pytest
from fakes import proxying

from tokentape import AsyncClient


async def test_the_reward_rises_and_each_batch_is_of_the_pushed_weights(store, run, whole):
    """The recorded logprobs equal the trainer's before each update; the update lowers the loss; the reward rises."""
    cut = [] if whole else ["--steps", 5, "--groups", 2, "--size", 8, "--rate", 250]
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
    assert max(rewards[-2:]) > (0.75 if whole else rewards[0] + 0.05), rewards
    assert {"done"} == {group["status"] for group in groups}
    assert {str(line[0]) for line in lines} == {span["policy_version"] for row in rows for span in row["spans"]}
    assert str(lines[-1][0]) == str(announced)
    assert sum(line[5] for line in lines) == sum(sum(row["mask"]) for row in rows)


def test_the_gradient_is_that_of_the_loss():
    """By finite differences, with and without clipping; only tokens of the mask count."""
    draws = np.random.default_rng(5)
    tokens = draws.integers(0, 28, size=40)
    row = {
        "token_ids": tokens.tolist(),
        "mask": [0] * 4 + [1] * 20 + [0] * 4 + [1] * 12,
        "logprobs": [None] * 4 + [-3.3] * 20 + [None] * 4 + [-3.4] * 12,
    }
    groups = [{"data": [row | {"advantages": 1.5}, row | {"advantages": -1.0}]}]
    sampled = grpo_numpy.Sampled(groups)
    logits = draws.normal(scale=0.3, size=(28, 28))
    _, gradient, ratio = grpo_numpy.loss_of(logits, sampled)

    assert 64 == len(sampled.tokens)
    assert sampled.before[20] == tokens[27]
    assert (ratio > 1.2).any()
    assert (ratio < 0.8).any()
    for before, token in zip(sampled.before[:6], sampled.tokens[:6], strict=True):
        moved = [logits.copy(), logits.copy()]
        moved[0][before, token] += 1e-4
        moved[1][before, token] -= 1e-4
        up, down = (grpo_numpy.loss_of(table, sampled)[0] for table in moved)
        assert (up - down) / 2e-4 == pytest.approx(gradient[before, token], abs=2e-5)


@pytest.mark.parametrize(
    ("words", "reward"),
    [(("bababababada", "abababababab"), 1.0), (("bababababada", ""), 0.5), (("aaaaaaaaaaaa", "b"), 0)],
)
def test_the_reward_counts_turns_between_consonants_and_vowels(words, reward):
    """Words that end early lose the missing ones."""
    assert reward == grpo_numpy.reward_of(words)


async def test_weights_are_pushed_while_no_call_is_in_flight_and_calls_resume_after_a_failure():
    """If the engine is unreachable, the proxy is resumed and its policy version is unchanged."""
    output = []

    async def note(word, *_, **__):
        output.append(word)

    client = SimpleNamespace(
        pause=lambda **_: note("pause"), resume=lambda: note("resume"), put_policy=lambda _: note("put_policy")
    )
    with pytest.raises(OSError, match="refused"):
        await grpo_numpy.push(client, "http://127.0.0.1:9", np.zeros((28, 28), np.float32), 1)

    assert ["pause", "resume"] == output
