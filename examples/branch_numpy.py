"""Advantages of steps in numpy: branches of recorded rollouts teach a policy what whole rollouts of as many tokens do not.

Shows `branches` and `advantage=vine`. The agent makes eight calls. The first three replies are luck: they draw a number, half
of the reward. The others are skill: the other half is the share of them that are the letter after the prompt's. Branches before
the fourth call have its luck in common. Both kinds of runs train on as many sampled tokens: on groups of whole rollouts, or on
two rollouts and branches of each. The program starts the engine.
"""

import argparse
import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import numpy as np
from bigram_engine import VOCABULARY, Table, log_softmax, serving
from matplotlib import pyplot as plt
from openai import AsyncOpenAI

from tokentape import AsyncClient

LETTERS = "abcdefgh"  # of the prompts, one for each call
LUCK = 3  # calls
BRANCHES = 4  # of each rollout
RIGHT = {letter: VOCABULARY.index(letter) + 1 for letter in LETTERS[LUCK:]}  # the token that is the right reply
SIZE = 2 + 2 * BRANCHES * (len(LETTERS) - LUCK) // len(
    LETTERS
)  # of a group of whole rollouts with as many sampled tokens
CONTEXT = -2  # a reply depends on the last letter of its prompt, which is before the end of the turn
KINDS = ("whole rollouts", "branches")
Curve = list[tuple[int, float]]  # sampled tokens, and the probability of a right reply


def reward_of(replies: Sequence[str]) -> float:
    """Return the mean of the luck and of the share of right replies."""
    luck = blake2b("/".join(replies[:LUCK]).encode()).digest()[0] / 255
    skills = [reply == VOCABULARY[token] for reply, token in zip(replies[LUCK:], RIGHT.values(), strict=True)]
    return (luck + sum(skills) / len(skills)) / 2


async def play(client: AsyncClient, agents: AsyncOpenAI, rollout: dict[str, Any]) -> None:
    """Run the agent in a rollout, from its start, and finish it with its reward."""
    agent = agents.with_options(base_url=rollout["base_url"], api_key=rollout["api_key"])
    messages: list[Any] = []
    for letter in LETTERS:
        messages.append({"role": "user", "content": letter})
        reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    await client.finish_rollout(rollout["rollout_id"], reward=reward_of([it["content"] for it in messages[1::2]]))


async def play_all(client: AsyncClient, agents: AsyncOpenAI, kind: str) -> list[dict[str, Any]]:
    """Run the agent in a group of rollouts, and in branches of each if the kind says so; return the rows of all."""
    groups = [await client.open_group(SIZE if kind == KINDS[0] else 2)]
    await asyncio.gather(*(play(client, agents, rollout) for rollout in groups[0]["rollouts"]))
    for source in groups[0]["rollouts"] if kind == KINDS[1] else ():
        steps = [step["step_id"] async for step in client.steps(source["rollout_id"])]
        groups.append(await client.branches(source["rollout_id"], steps[LUCK], BRANCHES))
        await asyncio.gather(*(play(client, agents, rollout) for rollout in groups[-1]["rollouts"]))
    advantage = "rloo" if kind == KINDS[0] else "vine"
    return [row for group in groups async for row in client.export_group(group["group_id"], advantage=advantage)]


def sampled(rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """Return the letter before each sampled token, the token, and its advantage: of its rollout, or of its step."""
    owned = [(row, span) for row in rows for span in row["spans"] if span["owned"]]  # each is one token
    given = [(row["advantages"], span["step_id"]) for row, span in owned]
    return (
        [row["token_ids"][span["start"] + CONTEXT] for row, span in owned],
        [row["token_ids"][span["start"]] for row, span in owned],
        [advantages[step] if isinstance(advantages, dict) else advantages for advantages, step in given],
    )


def learn(logits: Table, rows: Sequence[dict[str, Any]], rate: float) -> int:
    """Take a step along the policy gradient, with advantages of unit deviation; return the number of tokens."""
    before, tokens, advantages = sampled(rows)
    weight = rate * np.array(advantages) / (np.std(advantages) + 1e-9) / len(tokens)
    change = -np.exp(log_softmax(logits)) * np.bincount(before, weight, len(VOCABULARY))[:, None]
    np.add.at(change, (before, tokens), weight)
    logits += change
    return len(tokens)


def skill(logits: Table) -> float:
    """Return the mean probability of the right reply to a letter of skill."""
    known = np.exp(log_softmax(logits))
    return float(np.mean([known[VOCABULARY.index(letter), token] for letter, token in RIGHT.items()]))


async def train(client: AsyncClient, engine: str, kind: str, tokens: int, rate: float) -> Curve:
    """Train a new policy until this many tokens are sampled."""
    logits: Table = np.zeros((len(VOCABULARY), len(VOCABULARY)), dtype=np.float32)
    curve, run = [(0, skill(logits))], uuid4().hex

    def push() -> None:
        urlopen(Request(f"{engine}/load_weights", logits.tobytes(), method="POST")).read()  # noqa: S310 - a fixed URL

    async with AsyncOpenAI(base_url=client.url, api_key="per rollout") as agents:  # one connection pool
        while curve[-1][0] < tokens:
            await client.update_policy(len(curve) - 1, push, run=run)
            count = learn(logits, await play_all(client, agents, kind), rate)
            curve.append((curve[-1][0] + count, skill(logits)))
    return curve


async def compare(url: str, engine: str, *, runs: int, tokens: int, rate: float, out: Path) -> dict[str, list[Curve]]:
    """Train policies of both kinds: print a row for each, and plot all."""
    curves: dict[str, list[Curve]] = {kind: [] for kind in KINDS}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.set(xlabel="sampled tokens", ylabel="probability of a right reply", ylim=(0, 1))
    print("probability of a right reply after  500  1000  1500  2000 tokens")
    async with AsyncClient(url) as client:
        for kind in KINDS * runs:
            curve = await train(client, engine, kind, tokens, rate)
            counts, known = np.array(curve).T
            print(f"{kind:33}", *(f"{np.interp(at, counts, known):.3f}" for at in range(500, 2001, 500)), flush=True)
            axes.plot(counts, known, color=f"C{KINDS.index(kind)}", label=None if curves[kind] else kind)
            curves[kind].append(curve)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=100)
    plt.close(figure)
    return curves


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Curve]]:
    """Run the engine, train and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8402, help="port of the engine (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the engine (default: random)")
    parser.add_argument("--runs", type=int, default=3, help="policies of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=30.0, help="learning rate (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("branches.png"), help="image file (default: %(default)s)")
    options = vars(parser.parse_args(arguments))
    with serving("127.0.0.1", options.pop("port"), options.pop("seed"), CONTEXT) as engine:
        return asyncio.run(compare(options.pop("url"), engine, **options))


if __name__ == "__main__":
    main()
