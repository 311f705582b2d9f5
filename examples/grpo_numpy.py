"""GRPO in numpy: groups of rollouts through the proxy, a policy gradient on the exported arrays, new weights for the engine.

Shows the loop of a trainer: `open_group`, agents that run at once, a reward each, `batches(...)`, and, around the push of new
weights, `pause`, `put_policy` and `resume`. What is trained is the policy that samples, so the logprobs that the trainer
computes anew are the recorded ones: `ratio-1` is the largest difference of their ratio from 1 before the first update.

The task has nothing to do with language: words in which consonants and vowels take turns. An agent asks for a word, then for
another one, which makes prompts inside of sequences; their tokens are masked.
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
Line = tuple[int, float, float, float, float, int, str]  # of the table that is printed
ASKED = ("Say a word", "And another one")
WORD_TOKENS = 12


async def talk(agent: AsyncOpenAI) -> list[str]:
    """The agent: it knows nothing of recording, ids or rewards. Two words."""
    messages: list[Any] = []
    for asked in ASKED:
        messages.append({"role": "user", "content": asked})
        reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=WORD_TOKENS)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    return [message["content"] for message in messages[1::2]]


def reward_of(words: Sequence[str]) -> float:
    """The share of neighbours, in words of full length, that are a consonant and a vowel."""
    pairs = [pair for word in words for pair in pairwise(word) if "".join(pair).isalpha()]
    turns = sum((left in "aeiou") != (right in "aeiou") for left, right in pairs)
    return turns / (len(words) * (WORD_TOKENS - 1))


async def play(client: AsyncClient, agents: AsyncOpenAI, rollout: dict[str, Any]) -> tuple[float, str]:
    """One rollout, from its key to its reward, and what was said."""
    words = await talk(agents.with_options(base_url=rollout["base_url"], api_key=rollout["api_key"]))
    await client.finish_rollout(rollout["rollout_id"], reward=reward_of(words))
    return reward_of(words), " ".join(words)


class Sampled:
    """What was sampled in a batch, one entry a token: the only tokens that are trained."""

    def __init__(self, groups: Sequence[ClaimedGroup]) -> None:
        rows = [row for group in groups for row in group["data"]]
        masks = [np.array(row["mask"], dtype=bool) for row in rows]
        ids = [np.array(row["token_ids"]) for row in rows]
        self.tokens = np.concatenate([each[mask] for each, mask in zip(ids, masks, strict=True)])
        # The token before: what a larger model would call the context. The first token of a row is never sampled.
        self.before = np.concatenate([np.roll(each, 1)[mask] for each, mask in zip(ids, masks, strict=True)])
        told = [np.array(row["logprobs"], dtype=np.float32)[mask] for row, mask in zip(rows, masks, strict=True)]
        self.recorded: Floats = np.concatenate(told)
        lengths = [mask.sum() for mask in masks]
        self.advantages: Floats = np.repeat([row["advantages"] for row in rows], lengths).astype(np.float32)


def loss_of(logits: Table, sampled: Sampled, clip: float = 0.2) -> tuple[float, Table, Floats]:
    """The clipped surrogate of GRPO, its gradient, and the ratio of each token: now to when it was sampled."""
    logprobs = log_softmax(logits)
    ratio = np.exp(logprobs[sampled.before, sampled.tokens] - sampled.recorded)
    free = ratio * sampled.advantages
    held = np.clip(ratio, 1 - clip, 1 + clip) * sampled.advantages
    weight = np.where(free <= held, free, 0) / len(ratio)  # where the clipped one is smaller, nothing moves
    gradient = np.exp(logprobs) * np.bincount(sampled.before, weight, len(VOCABULARY))[:, None]
    np.subtract.at(gradient, (sampled.before, sampled.tokens), weight)
    return -float(np.minimum(free, held).mean()), gradient.astype(np.float32), ratio


async def push(client: AsyncClient, engine: str, logits: Table, version: int) -> None:
    """Other weights, while no call is in flight: a turn is of one version, and says which."""
    await client.pause(drain_s=30)
    try:
        body = Request(f"{engine}/load_weights", logits.astype("<f4").tobytes(), method="POST")  # noqa: S310 - ours
        await asyncio.to_thread(lambda: urlopen(body).close())  # noqa: S310
        await client.put_policy(version)
    finally:
        await client.resume()


async def collect(client: AsyncClient, groups: int, size: int) -> tuple[list[ClaimedGroup], list[float], str]:
    """As many groups, played at once and claimed as one batch; with all rewards, and what the best one said."""
    opened = await asyncio.gather(*(client.open_group(size) for _ in range(groups)))
    rollouts = [rollout for group in opened for rollout in group["rollouts"]]
    async with AsyncOpenAI(base_url=client.url, api_key="each has its own") as agents:  # whose connections all share
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
    """The loop; a line for each step, and all of them in the end."""
    logits: Table = np.zeros((len(VOCABULARY), len(VOCABULARY)), dtype=np.float32)
    lines: list[Line] = []
    print("policy  reward  loss before ->  after    ratio-1  tokens  words of the best")
    async with AsyncClient(url) as client:
        for version in range(steps):
            await push(client, engine, logits, version)
            taken, rewards, words = await collect(client, groups, size)
            sampled = Sampled(taken)
            before, _, ratio = loss_of(logits, sampled)
            for _ in range(4):  # epochs on the same batch: from the second on the ratio is not 1, and the clip works
                logits -= rate * loss_of(logits, sampled)[1]
            moved = float(np.abs(ratio - 1).max())
            after = loss_of(logits, sampled)[0]
            lines.append((version, float(np.mean(rewards)), before, after, moved, len(sampled.tokens), words))
            print("{:6} {:7.3f} {:12.4f} -> {:7.4f} {:9.1e} {:7}  {}".format(*lines[-1]), flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="the proxy (default: %(default)s)")
    parser.add_argument("--engine", default="http://127.0.0.1:8402", help="the bigram engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="batches to train on (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="groups a batch (default: %(default)s)")
    parser.add_argument("--size", type=int, default=8, help="rollouts a group (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=150.0, help="learning rate (default: %(default)s)")
    options = vars(parser.parse_args(arguments))
    return asyncio.run(train(options.pop("url"), options.pop("engine"), **options))


if __name__ == "__main__":
    main()
