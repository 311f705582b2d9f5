"""TRL's custom rollout function, fed by the proxy: `GRPOTrainer(..., rollout_func=make_rollout_func(url, solve))`.

Shows how an agent of any shape (several turns, tools, sub-agents) trains under TRL (seen with 1.16.0): the agent talks to the
proxy, the trainer gets the ids and logprobs that the engine sampled, and `env_mask` keeps what the agent put in between out of
the loss. Nothing is tokenized anew. `push` is called whenever the trainer has made a step, while no call is in flight, to give
the engine its new weights. `trl_grpo.py` trains with it; run by itself, this file prints what the trainer would be given.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from openai import AsyncOpenAI

from tokentape import AsyncClient

Prompt = Any  # as the data set has it: a text, or a list of messages
Solve = Callable[[AsyncOpenAI, Prompt], Awaitable[float]]  # an agent: it solves a prompt, and is told how well
Push = Callable[[Any], None]
RolloutFunc = Callable[[list[Prompt], Any], dict[str, list[Any]]]


def make_rollout_func(url: str, solve: Solve, *, api_key: str | None = None, push: Push | None = None) -> RolloutFunc:
    """What `rollout_func=` takes. `api_key` is a control key, where the proxy has one configured."""
    pushed: list[int] = []

    async def roll_out(prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        async with AsyncClient(url, api_key=api_key) as client, AsyncOpenAI(base_url=url, api_key="-") as agents:
            step = trainer.state.global_step
            if step not in pushed[-1:]:
                await announce(client, step, lambda: push(trainer) if push and step else None)
                pushed.append(step)
            names = group_names(len(prompts), trainer.num_generations)
            each = zip(prompts, names, strict=True)
            return gathered(await asyncio.gather(*(play(client, agents, solve, prompt, name) for prompt, name in each)))

    def rollout_func(prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        return asyncio.run(roll_out(prompts, trainer))

    return rollout_func


async def announce(client: AsyncClient, version: int, push: Callable[[], None]) -> None:
    """New weights and their version, while no call is in flight."""
    await client.pause(drain_s=60)
    try:
        await asyncio.to_thread(push)
        await client.put_policy(version)
    finally:
        await client.resume()


def group_names(prompts: int, size: int) -> list[str]:
    """A group's name for each prompt. TRL repeats a prompt as often as it wants it sampled, one after the other."""
    names = [uuid4().hex for _ in range(-(-prompts // size))]
    return [names[place // size] for place in range(prompts)]


async def play(client: AsyncClient, agents: AsyncOpenAI, solve: Solve, prompt: Prompt, group: str) -> dict[str, Any]:
    """One rollout: the row that TRL takes of it. Of a group without a size nothing waits in the queue of batches."""
    opened = await client.open_rollout(group_id=group)
    name = opened["rollout_id"]
    reward = await solve(agents.with_options(base_url=opened["base_url"], api_key=opened["api_key"]), prompt)
    await client.finish_rollout(name, reward=reward)
    # Where text came back as other ids than were sampled there are several sequences: what is not in the last is not trained.
    rows = [row async for row in client.export_rollout(name, format="trl", branches="last")]
    if len(rows) != 1 or not rows[0]["completion_ids"]:
        raise RuntimeError(
            f"TRL takes one row a rollout, and {name} has {len(rows)}: see {client.url}/rollouts/{name}/tree"
        )
    return rows[0]


def gathered(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as lists by key, in the order of the prompts."""
    return {key: [one for row in rows for one in row[key]] for key in rows[0]}


def reward_of_rollout(reward: list[float], **_: Any) -> list[float]:
    """The reward function for `reward_funcs=`: what the agent was given already."""
    return reward


async def solve_twice(agent: AsyncOpenAI, prompt: Prompt) -> float:
    """An agent for the demonstration: it asks, and asks again; the fewer words the second answer has, the better."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    said = ""
    for _ in range(2):
        reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=32)
        said = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Say it in other words."}]
    return 1 / max(len(said.split()), 1)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Call the function as the trainer does, and print the lengths of what it gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="the proxy (default: %(default)s)")
    options = parser.parse_args(arguments)
    prompts = [[{"role": "user", "content": text}] for text in ("Name a city.", "Name two fruits.") for _ in range(2)]
    trainer = SimpleNamespace(num_generations=2, state=SimpleNamespace(global_step=0))
    given = make_rollout_func(options.url, solve_twice)(prompts, trainer)
    print("prompt_ids  completion_ids  logprobs  env_mask  trained  reward")
    for row in range(len(prompts)):
        prompt, ids, logprobs, mask = (
            len(given[key][row]) for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        )
        trained = sum(given["env_mask"][row])
        print(f"{prompt:10} {ids:15} {logprobs:9} {mask:9} {trained:8} {given['reward'][row]:7.3f}")
    return given


if __name__ == "__main__":
    main()
