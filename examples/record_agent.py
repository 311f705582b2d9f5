"""A runner for an agent that was not written for us: it opens a rollout, runs the agent, rewards it, and prints the rows.

Shows the whole of what recording takes: two variables in the agent's environment. What was sampled, how likely it was, and what
only stood in the prompt, comes back as one row of ids for each branch of the conversation.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokentape import Client

AGENT = Path(__file__).with_name("tool_agent.py")


def record(client: Client, command: Sequence[str]) -> str:
    """Run a command with a rollout of its own as its OpenAI; the rollout's id. Whatever goes wrong, it is finished."""
    opened = client.open_rollout(metadata={"agent": shlex.join(command)}, limits={"max_steps": 20})
    told = {"OPENAI_BASE_URL": opened["base_url"], "OPENAI_API_KEY": opened["api_key"]}
    done = subprocess.run(command, env={**os.environ, **told}, check=False)  # noqa: S603 - what the caller says
    rollout_id = opened["rollout_id"]
    reward = reward_of(client, rollout_id) if done.returncode == 0 else 0.0
    client.finish_rollout(rollout_id, "completed" if done.returncode == 0 else "failed", reward=reward)
    return rollout_id


def reward_of(client: Client, rollout_id: str) -> float:
    """The share of tool calls that worked. The recorded steps have every message that the agent sent."""
    messages: list[dict[str, Any]] = []
    for step in client.steps(rollout_id):
        messages = step["request"]["messages"]  # each call has all that came before it
    results = [message["content"] for message in messages if message["role"] == "tool"]
    return sum(not result.startswith("error") for result in results) / max(len(results), 1)


def shape_of(row: dict[str, Any]) -> str:
    """A row as runs of tokens: those of the prompt in brackets, sampled ones bare."""
    runs = [(sampled, len(list(run))) for sampled, run in groupby(row["mask"])]
    return " ".join(str(length) if sampled else f"[{length}]" for sampled, length in runs)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Record one run of the agent, and print its steps and its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="the proxy (default: %(default)s)")
    parser.add_argument(
        "agent", nargs="*", default=[sys.executable, str(AGENT)], help="a command (default: tool_agent.py)"
    )
    options = parser.parse_args(arguments)
    with Client(options.url) as client:
        rollout_id = record(client, options.agent)
        rollout = client.rollout(rollout_id)
        print(f"\n{rollout_id}: {rollout['status']}, reward {rollout['reward']}")
        print("step  prompt  sampled  finish      exact")
        for step in client.steps(rollout_id):
            choice = step["choices"][0]
            counts = f"{len(step['prompt_ids'] or ()):6}  {len(choice['ids']):7}"
            print(f"{step['index']:4}  {counts}  {choice['finish_reason']:10}  {step['fidelity']['exact']}")
        rows = list(client.export_rollout(rollout_id, format="sequences"))
    for row in rows:
        logprobs = [logprob for logprob, sampled in zip(row["logprobs"], row["mask"], strict=True) if sampled]
        print(f"row {row['branch']}: {len(row['token_ids'])} tokens, as [given] and sampled: {shape_of(row)}")
        print(f"       reward {row['reward']}, mean logprob of the sampled {sum(logprobs) / len(logprobs):.3f}")
    return rows


if __name__ == "__main__":
    main()
