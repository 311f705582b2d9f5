"""A rollout function for TRL: `GRPOTrainer(..., rollout_func=make_rollout_func(url, solve))`.

Shows how to train any agent (several turns, tools, sub-agents) with TRL (run with 1.16.0). The agent calls the proxy; the
trainer gets the ids and logprobs that the engine sampled, and `env_mask` excludes the agent's own tokens from the loss.
Nothing is tokenized again. `push` is called after each step of the trainer, while no call is in flight, to update the
engine's weights. `trl_grpo.py` trains with it; this file as a program prints the sizes of the rows.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from openai import AsyncOpenAI

from tokentape import AsyncClient, ClientError

Prompt = Any  # from the data set: a text, or a list of messages
Solve = Callable[[AsyncOpenAI, Prompt], Awaitable[float]]  # an agent: it solves a prompt and returns the reward
Push = Callable[[Any], None]
ATTEMPTS, IDLE_S = 3, 1800.0  # at a prompt; limit of a rollout that this process leaves open
RolloutFunc = Callable[[list[Prompt], Any], dict[str, list[Any]]]


def make_rollout_func(url: str, solve: Solve, *, api_key: str | None = None, push: Push | None = None) -> RolloutFunc:
    """Return the argument of `rollout_func=`. `api_key` is a control key, if the proxy requires one."""
    pushed: list[int] = []
    run = uuid4().hex  # a trainer that resumes from a checkpoint begins an epoch: its steps repeat

    async def roll_out(prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        async with AsyncClient(url, api_key=api_key) as client, AsyncOpenAI(base_url=url, api_key="-") as agents:
            step = trainer.state.global_step
            if step not in pushed[-1:]:
                update = partial(asyncio.to_thread, push, trainer) if push and step else lambda: None
                await client.update_policy(step, update, run=run)
                pushed.append(step)
            names = group_names(len(prompts), trainer.num_generations)
            pairs = zip(prompts, names, strict=True)
            playing = (play(client, agents, solve, prompt, name) for prompt, name in pairs)
            return gathered(filled(prompts, await asyncio.gather(*playing, return_exceptions=True)))  # all of them end

    def rollout_func(prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        return asyncio.run(roll_out(prompts, trainer))

    return rollout_func


def group_names(prompts: int, size: int) -> list[str]:
    """Return a group ID for each prompt. TRL repeats each prompt `size` times in a row."""
    names = [uuid4().hex for _ in range(-(-prompts // size))]
    return [names[place // size] for place in range(prompts)]


async def play(client: AsyncClient, agents: AsyncOpenAI, solve: Solve, prompt: Prompt, group: str) -> dict[str, Any]:
    """Return the row of the first rollout that has one for TRL, of `ATTEMPTS`; raise the last error.

    A group without a size does not enter the queue of batches.
    """
    errors: list[Exception] = []
    while len(errors) < ATTEMPTS:
        opened = await client.open_rollout(group_id=group, idle_s=IDLE_S)
        name = opened["rollout_id"]
        try:
            reward = await solve(agents.with_options(base_url=opened["base_url"], api_key=opened["api_key"]), prompt)
            await client.finish_rollout(name, reward=reward)
            # Drift splits a rollout into several sequences; only the last one is trained.
            rows = [row async for row in client.export_rollout(name, format="trl", branches="last")]
            if len(rows) == 1 and rows[0]["completion_ids"]:
                return rows[0]
            see = f"{client.url}/rollouts/{name}/tree"
            errors.append(RuntimeError(f"TRL takes one row a rollout, and {name} has {len(rows)}: see {see}"))
        except Exception as error:  # noqa: BLE001 - of this agent: the others continue
            errors.append(error)
            with suppress(ClientError):
                await client.finish_rollout(name, "failed")
    raise errors[-1]


def filled(prompts: Sequence[Prompt], rows: Sequence[dict[str, Any] | BaseException]) -> list[dict[str, Any]]:
    """Replace errors by copies of another row, if possible of the same prompt, that train no token; raise if all failed."""
    known = [(prompt, row) for prompt, row in zip(prompts, rows, strict=True) if isinstance(row, dict)]
    complete = []
    for prompt, row in zip(prompts, rows, strict=True):
        if isinstance(row, BaseException):
            if not known:
                raise row
            print(f"no token of a prompt is trained: {row!r}", file=sys.stderr)
            other = next((found for same, found in known if same == prompt), known[0][1])
            row = {**other, "env_mask": [[0] * len(bits) for bits in other["env_mask"]]}  # noqa: PLW2901
        complete.append(row)
    return complete


def gathered(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as lists by key, in the order of the prompts."""
    return {key: [value for row in rows for value in row[key]] for key in rows[0]}


def reward_of_rollout(reward: list[float], **_: Any) -> list[float]:
    """Return the rewards that the rollouts already have; the argument of `reward_funcs=`."""
    return reward


async def solve_twice(agent: AsyncOpenAI, prompt: Prompt) -> float:
    """Run a demonstration agent of two turns: the fewer words the second reply has, the higher the reward."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    text = ""
    for _ in range(2):
        reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=32)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Rephrase it."}]
    return 1 / max(len(text.split()), 1)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Call the function as the trainer does, and print the lengths of its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    options = parser.parse_args(arguments)
    prompts = [[{"role": "user", "content": text}] for text in ("Name a city.", "Name two fruits.") for _ in range(2)]
    trainer = SimpleNamespace(num_generations=2, state=SimpleNamespace(global_step=0))
    rows = make_rollout_func(options.url, solve_twice)(prompts, trainer)
    print("prompt_ids  completion_ids  logprobs  env_mask  trained  reward")
    for number in range(len(prompts)):
        prompt, ids, logprobs, mask = (
            len(rows[key][number]) for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        )
        trained = sum(rows["env_mask"][number])
        print(f"{prompt:10} {ids:15} {logprobs:9} {mask:9} {trained:8} {rows['reward'][number]:7.3f}")
    return rows


if __name__ == "__main__":
    main()
