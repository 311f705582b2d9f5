"""A group of Harbor trials: an agent tries one task several times, and the verifier's rewards are those of the rollouts.

    python examples/harbor_group.py --task tasks/hello --agent mini-swe-agent --model openai/policy --size 8

Requires harbor 0.25 (Python 3.12 and up). Its containers must reach the proxy: set `agents.url` to an address that they know.
Each trial is a rollout of its own, whose base URL and key the agent has. Retries of Harbor stay off: a rollout has one attempt.

Shows rollouts that are opened for another harness, and rewards from its verifier.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any, Literal

from tokentape import AsyncClient

KEYS = {"claude-code": "ANTHROPIC_API_KEY", "gemini-cli": "GEMINI_API_KEY"}  # of other agents: OPENAI_API_KEY
AT_ROOT = set(KEYS)  # agents that take the base URL without /v1


def agent_of(rollout: dict[str, Any], agent: str, model: str) -> dict[str, Any]:
    """Return Harbor's configuration of the agent of a rollout."""
    base_url = rollout["base_url"]
    if agent in AT_ROOT:
        base_url = base_url.removesuffix("/v1")
    env = {KEYS.get(agent, "OPENAI_API_KEY"): rollout["api_key"]}
    return {"name": agent, "model_name": model, "base_url": base_url, "env": env}


def ending_of(result: Any) -> tuple[Literal["completed", "failed"], float | None]:
    """Return the status and the reward of a rollout from a trial's result."""
    rewards = (result.verifier_result and result.verifier_result.rewards) or {}
    return ("completed" if result.exception_info is None else "failed"), rewards.get("reward")


async def run_group(client: AsyncClient, task: Path, agent: str, model: str, size: int) -> str:
    """Run the trials of a task, and finish their rollouts; return the group."""
    from harbor import AgentConfig, Job, JobConfig, TaskConfig  # noqa: PLC0415 - tests run without it

    group = await client.open_group(size=size, metadata={"task": task.name})
    configs = [agent_of(rollout, agent, model) for rollout in group["rollouts"]]
    rollouts = {
        config["base_url"]: rollout["rollout_id"] for config, rollout in zip(configs, group["rollouts"], strict=True)
    }

    async def finish(event: Any) -> None:
        status, reward = ending_of(event.result)
        await client.finish_rollout(rollouts[event.config.agent.base_url], status, reward=reward)

    agents = [AgentConfig(**config) for config in configs]
    config = JobConfig(
        agents=agents, tasks=[TaskConfig(path=task)], n_concurrent_trials=size, skip_credential_checks=True
    )
    try:
        job = await Job.create(config)
        job.on_trial_ended(finish)
        await job.run()
    finally:  # a trial that did not end leaves no rollout open
        for rollout in (await client.group(group["group_id"]))["rollouts"]:
            if rollout["status"] in ("open", "limited"):
                await client.finish_rollout(rollout["rollout_id"], "aborted")
    return str(group["group_id"])


def main() -> None:
    """Run one group, and print its rollouts and rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400")
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--agent", default="mini-swe-agent")
    parser.add_argument("--model", default="openai/policy")
    parser.add_argument("--size", type=int, default=8)
    asyncio.run(show_group(parser.parse_args()))


async def show_group(options: argparse.Namespace) -> None:
    """Run a group, and print its rollouts."""
    async with AsyncClient(options.url) as client:
        group_id = await run_group(client, options.task, options.agent, options.model, options.size)
        for rollout in (await client.group(group_id))["rollouts"]:
            print(rollout["rollout_id"], rollout["status"], rollout["reward"], rollout["steps"])


if __name__ == "__main__":
    main()
