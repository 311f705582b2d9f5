"""A small loop in GRPO's shape: groups of rollouts, agents with a tool, rewards, and consumers that take what is complete.

Run before a simulated engine and before a real one. What an agent says and asks is the caller's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import compress
from typing import Any

from openai import AsyncOpenAI

from proxy.client import AsyncClient

GROUPS, SIZE = 4, 4
FORMATS = ("trl", "tinker")
Converse = Callable[[AsyncOpenAI, int], Awaitable[None]]  # an agent, and how many turns it is to take


async def run_grpo_loop(client: AsyncClient, converse: Converse) -> dict[str, list[dict[str, Any]]]:
    """Open, run, reward, claim and acknowledge; the groups that each consumer was given, by its format."""
    await client.put_policy(7)
    opened = [await client.open_group(SIZE, group_id=f"group-{number}") for number in range(GROUPS)]
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in FORMATS}

    async def play(rollout: dict[str, Any], number: int) -> None:
        async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0) as agent:
            await converse(agent, 1 + number % 3)
        await client.finish_rollout(rollout["rollout_id"], reward=float(number % 2))

    async def consume(name: str) -> None:
        while sum(map(len, taken.values())) < GROUPS:
            claims = client.batches(consumer=name, groups=1, format=name, advantage="grpo", wait_s=1, lease_s=30)
            async for batch in claims:
                taken[name] += batch.groups

    await asyncio.gather(
        *(play(rollout, number) for group in opened for number, rollout in enumerate(group["rollouts"])),
        *map(consume, FORMATS),
    )
    return taken


async def check_taken(client: AsyncClient, taken: dict[str, list[dict[str, Any]]]) -> None:
    """Nothing is left over, nothing came twice, and every token that is trained is one that was sampled."""
    names = [group["group_id"] for groups in taken.values() for group in groups]
    assert sorted(names) == [f"group-{number}" for number in range(GROUPS)]
    assert ["done"] * GROUPS == [group["status"] async for group in client.groups()]
    assert [] == (await client.claim_batch(consumer="late", groups=10))["groups"]
    for name, groups in taken.items():
        for group in groups:
            sampled = [await sampled_of(client, rollout) for rollout in group["rollouts"]]
            assert sampled == list(CHECKS[name](group["data"]))
            assert all(ids for ids, _ in sampled)
            assert [] == group["skipped"]


async def sampled_of(client: AsyncClient, rollout: str) -> tuple[list[int], list[float]]:
    """The ids and logprobs that a rollout's steps recorded, in order."""
    steps = [step async for step in client.steps(rollout)]
    assert [True] * len(steps) == [step["fidelity"]["exact"] for step in steps]
    choices = [choice for step in steps for choice in step["choices"]]
    return [token for one in choices for token in one["ids"]], [value for one in choices for value in one["logprobs"]]


def trained_by_trl(data: dict[str, Any]):
    """By its mask; the reward is the trainer's to compare."""
    assert [0.0, 1.0, 0.0, 1.0] == data["reward"]
    for ids, logprobs, mask in zip(data["completion_ids"], data["logprobs"], data["env_mask"], strict=True):
        yield list(compress(ids, mask)), list(compress(logprobs, mask))


def trained_by_tinker(data: list[dict[str, Any]]):
    """By its advantages: in a group of two good and two bad rollouts they are 1 and -1, and 0 where nothing is trained."""
    assert [{-1.0}, {1.0}] * 2 == [set(datum["advantages"]) - {0.0} for datum in data]
    for datum in data:
        mask = [advantage != 0 for advantage in datum["advantages"]]
        yield list(compress(datum["target_tokens"], mask)), list(compress(datum["logprobs"], mask))


CHECKS = {"trl": trained_by_trl, "tinker": trained_by_tinker}
