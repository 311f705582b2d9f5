"""A runner that replaces an agent that dies: the next one gets the recorded responses, and continues where that one stopped.

Shows `replace: {"playback": true}` of a group: a failed rollout gets another one, which is a playback of it. The agent is
started again and knows nothing of this; the recorded responses are its own, with the same token ids, and cost no sampling.
Each attempt has an empty folder with the same path, since recorded tool calls contain paths.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokentape import Client

AGENT = Path(__file__).with_name("tool_agent.py")


def variables_of(opened: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment in which the clients of OpenAI and Anthropic send their calls to a rollout."""
    return {
        "OPENAI_BASE_URL": opened["base_url"],
        "OPENAI_API_KEY": opened["api_key"],
        "ANTHROPIC_BASE_URL": opened["base_url"].removesuffix("/v1"),
        "ANTHROPIC_API_KEY": opened["api_key"],
    }


def attempt(
    client: Client, opened: Mapping[str, Any], command: Sequence[str], folder: Path, dies_after: int | None
) -> bool:
    """Run the agent, and return whether it succeeds. It is killed once it has this many steps, as a preempted machine is."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {**os.environ, **variables_of(opened)}
    agent = subprocess.Popen(  # noqa: S603 - the command line's
        command, cwd=folder, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
    )
    while dies_after is not None and agent.poll() is None:
        if client.rollout(opened["rollout_id"])["counts"].get("steps", 0) >= dies_after:
            os.killpg(agent.pid, signal.SIGKILL)  # with its tools
            break
        time.sleep(0.01)
    return agent.wait() == 0


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the agent until an attempt succeeds; print the steps of each attempt, and return the rows of the group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    parser.add_argument("--dies-after", type=int, default=2, help="steps of the first attempt (default: %(default)s)")
    parser.add_argument("--preset", action="append", default=[], help="texts to ignore, such as those of claude-code")
    parser.add_argument(
        "agent", nargs="*", default=[sys.executable, str(AGENT)], help="the agent's command (default: tool_agent.py)"
    )
    options = parser.parse_args(arguments)
    dies_after: int | None = options.dies_after
    with Client(options.url) as client, TemporaryDirectory() as home:
        group = client.open_group(1, replace={"playback": True, "presets": options.preset})
        opened: Any = group["rollouts"][0]
        while opened is not None:
            rollout_id, succeeds = (
                opened["rollout_id"],
                attempt(client, opened, options.agent, Path(home) / "work", dies_after),
            )
            finished = client.finish_rollout(
                rollout_id, "completed" if succeeds else "failed", reward=1.0 if succeeds else None
            )
            print(f"\n{rollout_id}: {finished['status']}")
            for step in client.steps(rollout_id):
                origin = "from the tape" if step.get("inherited") else "sampled"
                print(f"{step['index']:4}  {step['step_id']}  {step['status']:8}  {origin}")
            opened, dies_after = finished.get("replaced_by"), None
        rows = list(client.export_group(group["group_id"], format="sequences"))
    for row in rows:
        print(
            f"row {row['branch']}: {sum(row['mask'])} sampled tokens of {len(row['token_ids'])}, reward {row['reward']}"
        )
    return rows


if __name__ == "__main__":
    main()
