"""A small loop in GRPO's shape: groups of rollouts, agents with a tool, rewards, consumers, and weight updates meanwhile.

It runs with the simulator and with a real engine. The caller supplies the agent's messages.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import compress
from typing import Any

from openai import AsyncOpenAI

from tokentape import AsyncClient

GROUPS, SIZE, FIRST_VERSION = 4, 4, 7
DEADLINES = {"deadline_s": 3600, "idle_s": 600}
Converse = Callable[[AsyncOpenAI, int], Awaitable[None]]  # an agent, and its number of turns


async def run_grpo_loop(client: AsyncClient, converse: Converse, *formats: str) -> dict[str, list[dict[str, Any]]]:
    """Open, run, reward, claim, update and acknowledge; return the groups that each consumer got, by its format."""
    await client.put_policy(FIRST_VERSION)
    opened = [await client.open_group(SIZE, group_id=f"group-{number}", **DEADLINES) for number in range(GROUPS)]
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in formats}
    updating = asyncio.Lock()  # one client at a time updates a policy

    async def play(rollout: dict[str, Any], number: int) -> None:
        async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0) as agent:
            await converse(agent, 1 + number % 3)
        await client.finish_rollout(rollout["rollout_id"], reward=float(number % 2))

    async def consume(name: str) -> None:
        while sum(map(len, taken.values())) < GROUPS:
            claims = client.batches(consumer=name, groups=1, format=name, advantage="grpo", wait_s=1, lease_s=30)
            async for batch in claims:
                async with updating:  # agents of other groups are running
                    taken[name] += batch.groups
                    version = FIRST_VERSION + sum(map(len, taken.values()))
                    await client.update_policy(version, lambda: None, in_flight="continue")

    await asyncio.gather(
        *(play(rollout, number) for group in opened for number, rollout in enumerate(group["rollouts"])),
        *map(consume, formats),
    )
    return taken


async def check_taken(client: AsyncClient, taken: dict[str, list[dict[str, Any]]]) -> None:
    """Assert that nothing is left, nothing came twice, and that exactly the sampled tokens are trained, once, in order."""
    names = [group["group_id"] for groups in taken.values() for group in groups]
    assert sorted(names) == [f"group-{number}" for number in range(GROUPS)], names
    assert [group["status"] async for group in client.groups()] == ["done"] * GROUPS
    assert (await client.claim_batch(consumer="late", groups=10))["groups"] == []
    assert str(FIRST_VERSION + GROUPS) == (await client.policy())["version"]
    for name, groups in taken.items():
        for group in groups:
            sampled = [pair for rollout in group["rollouts"] async for pair in sampled_of(client, rollout)]
            trained = [pair for row in CHECKS[name](group["data"]) for pair in row]
            assert sampled == trained, f"{name} of {group['group_id']} trains other tokens than were sampled"
            assert group["skipped"] == []


async def sampled_of(client: AsyncClient, rollout: str) -> AsyncIterator[tuple[int, float]]:
    """Return each id that a rollout's steps recorded, with its logprob, in order."""
    async for step in client.steps(rollout):
        assert step["fidelity"]["exact"], step["fidelity"]
        for choice in step["choices"]:
            assert choice["ids"]
            for pair in zip(choice["ids"], choice["logprobs"], strict=True):
                yield pair


def trained_by_trl(data: dict[str, Any]) -> Iterator[list[tuple[int, float]]]:
    """Return the ids trained by the mask; the reward is compared by the trainer."""
    assert data["reward"] == [0.0, 1.0, 0.0, 1.0], data["reward"]
    for ids, logprobs, mask in zip(data["completion_ids"], data["logprobs"], data["env_mask"], strict=True):
        yield list(compress(zip(ids, logprobs, strict=True), mask))


def trained_by_tinker(data: list[dict[str, Any]]) -> Iterator[list[tuple[int, float]]]:
    """Return the ids trained by advantages: 1 and -1 for two good and two bad rollouts, 0 where nothing is trained."""
    for datum in data:
        assert set(datum["advantages"]) - {0.0} in ({1.0}, {-1.0}), datum["advantages"]
        yield list(compress(zip(datum["target_tokens"], datum["logprobs"], strict=True), datum["advantages"]))


def trained_by_examples(data: list[dict[str, Any]]) -> Iterator[list[tuple[int, float]]]:
    """Return the ids trained by the masks, turn by turn."""
    for example in data:
        yield list(compress(zip(example["token_ids"], example["logprobs"], strict=True), example["mask"]))


CHECKS = {"trl": trained_by_trl, "tinker": trained_by_tinker, "training_examples": trained_by_examples}
