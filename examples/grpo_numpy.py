"""Asynchronous GRPO in numpy: agents run while the trainer trains on batches of groups and updates the engine's weights.

Shows a training loop: `open_group` with deadlines, a reward per rollout, `batches(...)`, `update_policy(...)`, and new groups
for each claimed batch. Turns can have weights older than the latest: `stale` is the share of their tokens in a batch. `ratio-1`
is the largest difference from 1 of a token's ratio to its recorded probability, with the weights of its policy version.
The task is words in which consonants and vowels alternate. An agent requests two, so sequences have prompts between words.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from itertools import pairwise
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from bigram_engine import VOCABULARY, Table, decode, log_softmax
from openai import AsyncOpenAI

from tokentape import AsyncClient, ClaimedGroup

Floats = npt.NDArray[np.float32]
Line = tuple[int, float, float, float, float, int, float, str]  # a row of the printed table
PROMPTS = ("Write a word", "Write another one")
WORD_TOKENS = 12
LIMITS: Any = {"deadline_s": 60.0, "idle_s": 10.0, "start_s": 10.0}  # they end a rollout after its agent failed


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


async def play(client: AsyncClient, agents: AsyncOpenAI, rollout: dict[str, Any]) -> None:
    """Run one rollout and finish it; a rollout that fails is finished by its deadline, and its group has one fewer."""
    with suppress(Exception):  # of this agent: the others continue
        words = await talk(agents.with_options(base_url=rollout["base_url"], api_key=rollout["api_key"]))
        await client.finish_rollout(rollout["rollout_id"], reward=reward_of(words))


async def play_groups(client: AsyncClient, agents: AsyncOpenAI, groups: int, size: int) -> None:
    """Open groups and run their rollouts concurrently."""
    opened = await asyncio.gather(*(client.open_group(size, **LIMITS) for _ in range(groups)))
    await asyncio.gather(*(play(client, agents, rollout) for group in opened for rollout in group["rollouts"]))


class Sampled:
    """The sampled tokens of a batch, one entry per token: the only tokens that are trained."""

    def __init__(self, groups: Sequence[ClaimedGroup]) -> None:
        rows = [row for group in groups for row in group["data"]]
        mask = np.concatenate([row["mask"] for row in rows]).astype(bool)
        ids = np.concatenate([row["token_ids"] for row in rows])
        self.tokens = ids[mask]
        # The previous token is the whole context of this model. The first token of a row is never sampled.
        self.before = np.roll(ids, 1)[mask]
        self.recorded: Floats = np.array([value for row in rows for value in row["logprobs"]], np.float32)[mask]
        advantages = np.repeat([row["advantages"] for row in rows], [len(row["mask"]) for row in rows])
        self.advantages: Floats = advantages[mask].astype(np.float32)
        spans = [span for row in rows for span in row["spans"] if span["owned"]]  # each is a turn
        lengths = [span["end"] - span["start"] for span in spans]
        self.versions = np.repeat([int(span["policy_version"]) for span in spans], lengths)


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


async def push(client: AsyncClient, engine: str, logits: Table, version: int, run: str) -> None:
    """Update the weights once calls in flight have ended. The ID of a run begins an epoch, with version 0."""
    body = Request(f"{engine}/load_weights", logits.astype("<f4").tobytes(), method="POST")  # noqa: S310 - a fixed URL
    await client.update_policy(version, lambda: asyncio.to_thread(lambda: urlopen(body).close()), run=run)  # noqa: S310


def learn(weights: list[Table], groups: Sequence[ClaimedGroup], rate: float) -> Line:
    """Train on one batch: append the next weights; return a row of the table."""
    sampled, version, logits = Sampled(groups), len(weights) - 1, weights[-1].copy()
    logprobs = np.array([log_softmax(table) for table in weights])[sampled.versions, sampled.before, sampled.tokens]
    moved = float(np.abs(np.exp(logprobs - sampled.recorded) - 1).max())
    for _ in range(4):  # epochs on one batch: a token with a ratio outside the clip range has no gradient
        logits -= rate * loss_of(logits, sampled)[1]
    before, after = (loss_of(table, sampled)[0] for table in (weights[-1], logits))
    weights.append(logits)
    reward = float(np.mean([reward for group in groups for reward in group["rewards"]]))
    stale, last = float((sampled.versions < version).mean()), decode(sampled.tokens[-2 * WORD_TOKENS :])
    return version, reward, before, after, moved, len(sampled.tokens), stale, last


async def train(url: str, engine: str, *, steps: int, groups: int, size: int, rate: float) -> list[Line]:
    """Run the training loop: print a row per step, and return all rows."""
    weights: list[Table] = [np.zeros((len(VOCABULARY), len(VOCABULARY)), dtype=np.float32)]  # by policy version
    lines, run = list[Line](), uuid4().hex
    print("policy  reward  loss before ->  after    ratio-1  tokens  stale  last words")
    async with (
        AsyncClient(url) as client,
        AsyncOpenAI(base_url=client.url, api_key="per rollout") as agents,  # one connection pool
        asyncio.TaskGroup() as playing,
        aclosing(client.batches(consumer="grpo", groups=groups, exact=True, advantage="grpo")) as batches,
    ):
        await push(client, engine, weights[0], 0, run)
        playing.create_task(play_groups(client, agents, min(2, steps) * groups, size))
        async for batch in batches:
            if len(lines) + 2 < steps:  # agents are two batches ahead, and run while this one is trained
                playing.create_task(play_groups(client, agents, groups, size))
            lines.append(await asyncio.to_thread(learn, weights, batch.groups, rate))
            print("{:6} {:7.3f} {:12.4f} -> {:7.4f} {:9.1e} {:7} {:6.2f}  {}".format(*lines[-1]), flush=True)
            await push(client, engine, weights[-1], len(lines), run)
            if len(lines) == steps:
                await batch.ack()
                break
    return lines


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy")
    parser.add_argument("--engine", default="http://127.0.0.1:8402", help="URL of bigram_engine.py")
    parser.add_argument("--steps", type=int, default=40, help="batches to train on")
    parser.add_argument("--groups", type=int, default=4, help="groups per batch")
    parser.add_argument("--size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--rate", type=float, default=150.0, help="learning rate")
    return asyncio.run(train(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
