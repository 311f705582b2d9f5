"""Shapes of rollouts with a real engine: what an agent does with its history, and the resulting tree and rows."""

import aiohttp
import pytest

from .test_conversation import check_rows
from .through import through_proxy

START, USER = [46, 77, 306, 1020], [1686, 198, 50]
EOS = 4089


class Agent:
    """An agent that sends token ids, so that each prompt is exactly what a shape needs."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http, self._seed = f"{url}/rollouts/r1/v1/completions", http, 0

    async def say(self, prompt: list[int], *, headers: dict | None = None, **more) -> list[list[int]]:
        """Make one call; return prompt and sampled ids of each choice."""
        self._seed += 1
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "seed": self._seed, "return_token_ids": True}
        async with self._http.post(self._url, json=body | more, headers=headers) as response:
            assert response.status == 200, await response.text()
            return [prompt + choice["token_ids"] for choice in (await response.json())["choices"]]


async def linear(agent):
    (turn,) = await agent.say(START)
    (turn,) = await agent.say(turn + USER)
    await agent.say(turn + USER)


async def parallel(agent):
    (turn,) = await agent.say(START)
    for other in ([1], [2], [3]):
        await agent.say(turn + other)


async def rollback(agent):
    (first,) = await agent.say(START)
    (second,) = await agent.say(first + USER)
    await agent.say(second + USER)
    await agent.say([*first, 7])


async def one_of_several(agent):
    several = await agent.say(START, n=3)
    await agent.say(several[1] + USER)


async def truncated(agent):
    (turn,) = await agent.say(START, ignore_eos=True)
    await agent.say(turn, ignore_eos=True)  # nothing in between


async def empty(agent):
    (turn,) = await agent.say(START, logit_bias={str(EOS): 100})
    assert turn == [*START, EOS]
    await agent.say(turn + USER)


async def compaction(agent):
    (turn,) = await agent.say(START)
    await agent.say(turn + USER)
    await agent.say([5, 6, 7])


async def edited(agent):
    (turn,) = await agent.say(START)
    await agent.say([*turn[:-1], 9, *USER])


async def retried(agent):
    for attempt in range(3):
        await agent.say(START, seed=1, headers={"X-Stainless-Retry-Count": str(attempt)})


async def identical(agent):
    (turn,) = await agent.say(START, temperature=0)
    (again,) = await agent.say(START, temperature=0, user="another")
    assert turn == again
    await agent.say(turn + USER)


@pytest.mark.parametrize(
    ("shape", "steps", "roots", "rows", "superseded"),
    [
        (linear, 3, 1, 1, 0),
        (parallel, 4, 1, 3, 0),
        (rollback, 4, 1, 2, 0),
        (one_of_several, 2, 3, 3, 0),
        (truncated, 2, 1, 1, 0),
        (empty, 2, 1, 1, 0),
        (compaction, 3, 2, 2, 0),
        (edited, 2, 2, 2, 0),
        (retried, 3, 3, 1, 2),
        (identical, 3, 2, 2, 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_steps_join_where_their_ids_extend_each_other(engine, tmp_path, shape, steps, roots, rows, superseded):
    """And nowhere else; each sampled token is trained once."""
    async with through_proxy(engine.url, tmp_path) as proxy, aiohttp.ClientSession() as http:
        await shape(Agent(proxy.url, http))
        recorded, exported = await proxy.steps("r1"), await proxy.rows("r1")
        tree = await proxy.get("/rollouts/r1/tree")

    assert all(step["fidelity"]["exact"] for step in recorded)
    assert (len(recorded), tree["counts"]["roots"]) == (steps, roots)
    assert rows == len(exported)
    replaced = {(node["step_id"], node["choice"]) for node in tree["nodes"] if node["superseded"]}
    assert superseded == len(replaced)
    check_rows([step for step in recorded if (step["step_id"], 0) not in replaced], exported)


async def test_a_retry_with_an_idempotency_key_is_one_step(engine, tmp_path):
    """The engine gets one request."""
    async with through_proxy(engine.url, tmp_path) as proxy, aiohttp.ClientSession() as http:
        agent = Agent(proxy.url, http)
        replies = [await agent.say(START, seed=3, headers={"Idempotency-Key": "k"}) for _ in range(3)]
        recorded = await proxy.steps("r1")

    assert replies[0] == replies[1] == replies[2]
    assert len(recorded) == 1
