"""GRPO in numpy: groups of rollouts through the proxy, a policy gradient on the exported arrays, new weights for the engine.

Shows the loop of a trainer: `open_group`, concurrent agents, a reward per rollout, `batches(...)`, and `pause`, `put_policy`
and `resume` around each weight update. The trained policy is the one that samples, so the trainer computes exactly the
recorded logprobs: `ratio-1` is the largest difference of their ratio from 1 before the first update of a batch.

The task is words in which consonants and vowels alternate. An agent requests a word, then another one, so sequences contain
prompt tokens between sampled ones; they are masked.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt
from bigram_engine import VOCABULARY, Table, log_softmax
from openai import AsyncOpenAI

from tokentape import AsyncClient, ClaimedGroup

Floats = npt.NDArray[np.float32]
Line = tuple[int, float, float, float, float, int, str]  # a row of the printed table
PROMPTS = ("Write a word", "Write another one")
WORD_TOKENS = 12


async def talk(agent: AsyncOpenAI) -> list[str]:
    """Run the agent, which requests two words; it does not depend on recording, ids or rewards."""
    messages: list[Any] = []
    for prompt in PROMPTS:
        messages.append({"role": "user", "content": prompt})
        reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=WORD_TOKENS)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    return [message["content"] for message in messages[1::2]]


def reward_of(words: Sequence[str]) -> float:
    """Return the share of adjacent letters that are a consonant and a vowel, relative to words of full length."""
    pairs = [pair for word in words for pair in pairwise(word) if "".join(pair).isalpha()]
    alternating = sum((left in "aeiou") != (right in "aeiou") for left, right in pairs)
    return alternating / (len(words) * (WORD_TOKENS - 1))


async def play(client: AsyncClient, agents: AsyncOpenAI, rollout: dict[str, Any]) -> tuple[float, str]:
    """Run one rollout and finish it; return its reward and its words."""
    words = await talk(agents.with_options(base_url=rollout["base_url"], api_key=rollout["api_key"]))
    await client.finish_rollout(rollout["rollout_id"], reward=reward_of(words))
    return reward_of(words), " ".join(words)


class Sampled:
    """The sampled tokens of a batch, one entry per token: the only tokens that are trained."""

    def __init__(self, groups: Sequence[ClaimedGroup]) -> None:
        rows = [row for group in groups for row in group["data"]]
        masks = [np.array(row["mask"], dtype=bool) for row in rows]
        ids = [np.array(row["token_ids"]) for row in rows]
        self.tokens = np.concatenate([row[mask] for row, mask in zip(ids, masks, strict=True)])
        # The previous token is the whole context of this model. The first token of a row is never sampled.
        self.before = np.concatenate([np.roll(row, 1)[mask] for row, mask in zip(ids, masks, strict=True)])
        recorded = [np.array(row["logprobs"], dtype=np.float32)[mask] for row, mask in zip(rows, masks, strict=True)]
        self.recorded: Floats = np.concatenate(recorded)
        lengths = [mask.sum() for mask in masks]
        self.advantages: Floats = np.repeat([row["advantages"] for row in rows], lengths).astype(np.float32)


def loss_of(logits: Table, sampled: Sampled, clip: float = 0.2) -> tuple[float, Table, Floats]:
    """Return the clipped surrogate loss of GRPO, its gradient, and the probability ratio of each token."""
    logprobs = log_softmax(logits)
    ratio = np.exp(logprobs[sampled.before, sampled.tokens] - sampled.recorded)
    unclipped = ratio * sampled.advantages
    clipped = np.clip(ratio, 1 - clip, 1 + clip) * sampled.advantages
    weight = np.where(unclipped <= clipped, unclipped, 0) / len(ratio)  # clipped tokens have no gradient
    gradient = np.exp(logprobs) * np.bincount(sampled.before, weight, len(VOCABULARY))[:, None]
    np.subtract.at(gradient, (sampled.before, sampled.tokens), weight)
    return -float(np.minimum(unclipped, clipped).mean()), gradient.astype(np.float32), ratio


async def push(client: AsyncClient, engine: str, logits: Table, version: int) -> None:
    """Update the weights while no call is in flight, so that each turn has one policy version."""
    await client.pause(drain_s=30)
    try:
        body = Request(f"{engine}/load_weights", logits.astype("<f4").tobytes(), method="POST")  # noqa: S310 - a fixed URL
        await asyncio.to_thread(lambda: urlopen(body).close())  # noqa: S310
        await client.put_policy(version)
    finally:
        await client.resume()


async def collect(client: AsyncClient, groups: int, size: int) -> tuple[list[ClaimedGroup], list[float], str]:
    """Run the groups concurrently and claim them as one batch; also return all rewards and the best words."""
    opened = await asyncio.gather(*(client.open_group(size) for _ in range(groups)))
    rollouts = [rollout for group in opened for rollout in group["rollouts"]]
    async with AsyncOpenAI(base_url=client.url, api_key="per rollout") as agents:  # one connection pool
        played = await asyncio.gather(*(play(client, agents, rollout) for rollout in rollouts))
    taken: list[ClaimedGroup] = []
    async with aclosing(
        client.batches(consumer="grpo_numpy", groups=groups, format="sequences", advantage="grpo")
    ) as batches:
        async for batch in batches:
            taken += batch.groups
            if len(taken) >= groups:
                await batch.ack()
                return taken, [reward for reward, _ in played], max(played)[1]
    raise AssertionError("batches without wait_s have no end")


async def train(url: str, engine: str, *, steps: int, groups: int, size: int, rate: float) -> list[Line]:
    """Run the training loop: print a row per step, and return all rows."""
    logits: Table = np.zeros((len(VOCABULARY), len(VOCABULARY)), dtype=np.float32)
    lines: list[Line] = []
    print("policy  reward  loss before ->  after    ratio-1  tokens  best words")
    async with AsyncClient(url) as client:
        for version in range(steps):
            await push(client, engine, logits, version)
            taken, rewards, words = await collect(client, groups, size)
            sampled = Sampled(taken)
            before, _, ratio = loss_of(logits, sampled)
            for _ in range(4):  # epochs on one batch: from the second on, the ratio is not 1 and is clipped
                logits -= rate * loss_of(logits, sampled)[1]
            moved = float(np.abs(ratio - 1).max())
            after = loss_of(logits, sampled)[0]
            lines.append((version, float(np.mean(rewards)), before, after, moved, len(sampled.tokens), words))
            print("{:6} {:7.3f} {:12.4f} -> {:7.4f} {:9.1e} {:7}  {}".format(*lines[-1]), flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    parser.add_argument(
        "--engine", default="http://127.0.0.1:8402", help="URL of bigram_engine.py (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=25, help="batches to train on (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="groups per batch (default: %(default)s)")
    parser.add_argument("--size", type=int, default=8, help="rollouts per group (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=150.0, help="learning rate (default: %(default)s)")
    options = vars(parser.parse_args(arguments))
    return asyncio.run(train(options.pop("url"), options.pop("engine"), **options))


if __name__ == "__main__":
    main()
