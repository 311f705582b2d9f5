"""Asynchronous GRPO with a real transformer, a real vLLM and an unmodified OpenAI client, on a CPU: a reward that rises.

Shows docs/training-loop.md with a loss: an agent opens boxes with a tool and names what is in one. It starts a vLLM with the
model of `small_policy.py` and a proxy. `ratio-1` is the largest difference from 1 of the importance ratio, of the tokens that
the latest weights sampled: about 0, or the engine has other weights than the trainer.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch
from openai import AsyncOpenAI
from small_policy import COLOURS, EMPTY, QUESTION, WORDS, make, serving
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from tokentape import AsyncClient, ClaimedGroup

COLUMNS = ("token_ids", "mask", "logprobs")
TURNS, LIMITS = 3, {"idle_s": 60.0, "deadline_s": 600.0}
BOX = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS: Any = [{"type": "function", "function": {"name": "open_box", "parameters": BOX}}]


async def attempt(agents: AsyncOpenAI, colour: str, word: str, rollout: Mapping[str, Any]) -> float:
    """Run the agent: return 1 if it names the word that it found, 0.4 if it only found it, else 0."""
    agent = agents.with_options(base_url=rollout["base_url"], api_key=rollout["api_key"])
    messages: list[Any] = [{"role": "user", "content": QUESTION.format(colour)}]
    message: Any = None
    found = False
    for _ in range(TURNS):
        reply = await agent.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=40)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in message.tool_calls or ():
            is_it = json.loads(call.function.arguments).get("number") == COLOURS.index(colour)
            found = found or is_it
            messages.append({"role": "tool", "tool_call_id": call.id, "content": word if is_it else EMPTY})
        if not message.tool_calls:
            break
    return 0.4 * found + 0.6 * (found and message.content == word)


async def keep_playing(client: AsyncClient, agents: AsyncOpenAI, size: int) -> None:
    """Play one group after the other: the next one once this one is claimed or dropped."""
    while True:
        agent = partial(attempt, agents, random.choice(COLOURS), random.choice(WORDS))  # noqa: S311
        group = await client.play_group(size, agent, replace=True, rollout={"continuation": "append"}, **LIMITS)
        while (await client.group(group))["status"] == "complete":  # noqa: ASYNC110
            await asyncio.sleep(0.5)


def load_into_vllm(url: str, folder: Path) -> None:
    """Load the weights of a folder into a running vLLM."""
    with httpx2.Client(base_url=url, timeout=600) as engine:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        engine.post("/collective_rpc", json=reload).raise_for_status()
        engine.post("/reset_prefix_cache").raise_for_status()


class Learner:
    """The model that is trained, and its optimizer."""

    def __init__(self, folder: Path, rate: float, steps: int) -> None:
        self.folder, self.model = folder, Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, steps)

    def learn(self, groups: Sequence[ClaimedGroup], version: int, clip: float = 0.2) -> float:
        """Train on a batch and save the weights; return `ratio-1` before, of the tokens of this version."""
        rows = [row for group in groups for row in group["data"]]
        columns = {name: [torch.tensor([value or 0 for value in row[name]]) for row in rows] for name in COLUMNS}
        padded = {name: pad_sequence(values, batch_first=True) for name, values in columns.items()}  # on the right
        ids, mask = padded["token_ids"], padded["mask"][:, 1:]
        latest, apart = torch.zeros_like(ids), 0.0
        for number, row in enumerate(rows):
            for span in row["spans"]:
                latest[number, span["start"] : span["end"]] = span["policy_version"] == str(version)
        advantages = torch.tensor([row["advantages"] for row in rows])[:, None]
        for epoch in range(2):
            logprobs = self.model(ids).logits[:, :-1].log_softmax(-1)  # nothing attends to the padding
            ratio = (logprobs.gather(-1, ids[:, 1:, None])[..., 0] - padded["logprobs"][:, 1:]).exp()
            apart = apart if epoch else ((ratio - 1).abs() * mask * latest[:, 1:]).max().item()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
            self.optimizer.zero_grad()
            (-surrogate[mask == 1].mean()).backward()
            self.optimizer.step()
        self.schedule.step()
        self.model.save_pretrained(self.folder)
        return apart


async def train(url: str, engine: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Run the training loop; print and return the mean reward and `ratio-1` of each batch; write the rows for plots.py."""
    lines: list[tuple[float, float]] = []
    learner, groups = Learner(options.out / "policy", options.rate, options.steps), options.groups
    load = partial(asyncio.to_thread, load_into_vllm, engine, learner.folder)
    async with (
        AsyncClient(url) as client,
        AsyncOpenAI(base_url=url, api_key="per rollout") as agents,
        asyncio.TaskGroup() as playing,
        aclosing(client.batches(consumer="grpo", groups=groups, exact=True, advantage="grpo")) as batches,
    ):
        await client.put_policy(0)
        tasks = [playing.create_task(keep_playing(client, agents, options.size)) for _ in range(groups)]
        async for batch in batches:  # agents run while this batch is trained
            ratio = await asyncio.to_thread(learner.learn, batch.groups, len(lines))
            rewards = [reward or 0.0 for group in batch.groups for reward in group["rewards"]]
            lines.append((sum(rewards) / len(rewards), ratio))
            print(f"update {len(lines):3}  reward {lines[-1][0]:.3f}  ratio-1 {ratio:.1e}", flush=True)
            await client.update_policy(len(lines), load)
            if len(lines) == options.steps:
                await batch.ack()
                break
        for task in tasks:
            task.cancel()
        with (options.out / "rows.ndjson").open("w") as file:
            async for row in client.export(format="sequences", status="completed"):
                print(json.dumps(row), file=file)
    return lines


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float]]:
    """Make the model, start vLLM and the proxy, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learned"), help="folder to make (default: %(default)s)")
    parser.add_argument("--tokentape", default="tokentape", help="command of the proxy (default: %(default)s)")
    parser.add_argument("--imitate", type=int, default=500, help="batches of imitation before (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="batches to train on (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="groups per batch (default: %(default)s)")
    parser.add_argument("--size", type=int, default=8, help="rollouts per group (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True)
    make(options.out / "policy", options.imitate)
    with serving(options.out, options.tokentape) as (url, engine):
        return asyncio.run(train(url, engine, options))


if __name__ == "__main__":
    main()
