"""A runner for an agent that does not know TokenTape: it opens a rollout, runs the agent, sets a reward, and prints the rows.

Shows all that recording requires: two variables in the agent's environment. The result is one row of token ids, mask and
logprobs for each branch of the conversation.
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
    """Run a command with its own rollout as its OpenAI server; finish the rollout in any case and return its ID."""
    opened = client.open_rollout(metadata={"agent": shlex.join(command)}, limits={"max_steps": 20})
    variables = {"OPENAI_BASE_URL": opened["base_url"], "OPENAI_API_KEY": opened["api_key"]}
    done = subprocess.run(command, env={**os.environ, **variables}, check=False)  # noqa: S603 - the command line's
    rollout_id = opened["rollout_id"]
    reward = reward_of(client, rollout_id) if done.returncode == 0 else 0.0
    client.finish_rollout(rollout_id, "completed" if done.returncode == 0 else "failed", reward=reward)
    return rollout_id


def reward_of(client: Client, rollout_id: str) -> float:
    """Return the share of successful tool calls. The recorded steps contain every message that the agent sent."""
    messages: list[dict[str, Any]] = []
    for step in client.steps(rollout_id):
        messages = step["request"]["messages"]  # the last call contains all earlier messages
    results = [message["content"] for message in messages if message["role"] == "tool"]
    return sum(not result.startswith("error") for result in results) / max(len(results), 1)


def shape_of(row: dict[str, Any]) -> str:
    """Return the lengths of a row's runs of tokens: `[prompt] completion ...`."""
    runs = [(sampled, len(list(run))) for sampled, run in groupby(row["mask"])]
    return " ".join(str(length) if sampled else f"[{length}]" for sampled, length in runs)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Record one run of the agent, and print its steps and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    parser.add_argument(
        "agent", nargs="*", default=[sys.executable, str(AGENT)], help="the agent's command (default: tool_agent.py)"
    )
    options = parser.parse_args(arguments)
    with Client(options.url) as client:
        rollout_id = record(client, options.agent)
        rollout = client.rollout(rollout_id)
        print(f"\n{rollout_id}: {rollout['status']}, reward {rollout['reward']}")
        print("step  prompt  completion  finish      exact")
        for step in client.steps(rollout_id):
            choice = step["choices"][0]
            counts = f"{len(step['prompt_ids'] or ()):6}  {len(choice['ids']):10}"
            print(f"{step['index']:4}  {counts}  {choice['finish_reason']:10}  {step['fidelity']['exact']}")
        rows = list(client.export_rollout(rollout_id, format="sequences"))
    for row in rows:
        logprobs = [logprob for logprob, sampled in zip(row["logprobs"], row["mask"], strict=True) if sampled]
        print(f"row {row['branch']}: {len(row['token_ids'])} tokens, [prompt] and completion: {shape_of(row)}")
        print(f"       reward {row['reward']}, mean logprob {sum(logprobs) / len(logprobs):.3f}")
    return rows


if __name__ == "__main__":
    main()
