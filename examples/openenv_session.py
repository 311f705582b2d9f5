"""OpenEnv sessions for TRL's AsyncGRPOTrainer, with agents that own their loop and call TokenTape.

Shows how to train agents in processes of their own. TRL's `HarnessRolloutWorker` (1.16.0) trains what OpenEnv (0.10.0) calls a
session: it waits for the agent, reads the trace and verifies it. The agent is any command that reads OPENAI_BASE_URL and
OPENAI_API_KEY. Each session is a rollout with an API key of its own, and the trace has what the engine sampled:

    from functools import partial
    worker = HarnessRolloutWorker(harness_session_factory=partial(Sessions, URL, ["python", "agent.py"], grade), ...)
    AsyncGRPOTrainer(..., rollout_worker=worker)

`grade` gets the task and the messages, and returns the reward, or None for no reward. This file as a program runs one session
and prints its turns.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openenv.core.harness import (
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    TrainingTrace,
    TrainingTurn,
    VerifyResult,
)

from tokentape import Client

Grade = Callable[[Any, list[dict[str, Any]]], float | None]
IDLE_S = 600.0  # a rollout whose agent does nothing for so long is aborted


class Sessions(ResourceSessionFactory["Session"]):
    """Open a rollout for each session. `sampling`, which the worker passes, applies to every call of its agent."""

    def __init__(self, url: str, command: Sequence[str], grade: Grade, *, sampling: dict[str, Any]) -> None:
        self._url, self._command, self._grade, self._sampling = url, command, grade, sampling

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> "Session":
        """Open the rollout `episode_id` and start its agent, with the task as JSON in TASK and the seed in SEED."""
        client, sampling = Client(self._url), {"override": self._sampling}
        opened = client.open_rollout(episode_id, sampling=sampling, idle_s=IDLE_S, metadata={"task": task})
        own = {"OPENAI_BASE_URL": opened["base_url"], "OPENAI_API_KEY": opened["api_key"]}
        environment = {**os.environ, **own, "TASK": json.dumps(task), "SEED": str(seed)}
        try:
            agent = subprocess.Popen(self._command, env=environment)  # noqa: S603 - the trainer's own command
        except OSError:
            client.finish_rollout(opened["rollout_id"], "aborted")
            client.close()
            raise
        return Session(client, opened["rollout_id"], task, agent, self._grade)


class Session(ResourceSession):
    """A rollout whose agent is a process."""

    def __init__(
        self, client: Client, rollout_id: str, task: Any, agent: subprocess.Popen[bytes], grade: Grade
    ) -> None:
        self._client, self.rollout_id, self._task, self._agent, self._grade = client, rollout_id, task, agent, grade

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Return the exit code of the agent. Raises TimeoutError; what the agent sampled until then is trained."""
        try:
            return self._agent.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    def fetch_training_trace(self) -> TrainingTrace:
        """Return one turn for each choice with exact ids; calls without them (a failed one, a flagged one) have no turn."""
        return TrainingTrace(turns=list(self._turns()))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> VerifyResult:
        """Grade the transcript, and finish the rollout with the reward; `failed` if the agent failed."""
        has_failed = self._agent.poll() != 0
        reward = None if has_failed else self._grade(self._task, transcript)
        self._client.finish_rollout(self.rollout_id, "failed" if has_failed else "completed", reward=reward)
        return VerifyResult(env_reward=reward, done=True)

    def close(self) -> None:
        """Kill the agent if it runs, and abort its rollout if it is open."""
        if self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()
        if self._client.rollout(self.rollout_id)["status"] == "open":
            self._client.finish_rollout(self.rollout_id, "aborted")
        self._client.close()

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return nothing: the agent writes its own messages."""
        return []

    def list_tools(self) -> list[Any]:
        """Return nothing: the agent has its own tools."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return an error: the agent calls its own tools."""
        return ToolResult(error=f"{name}: the agent calls its own tools")

    def _turns(self) -> Iterator[TrainingTurn]:
        rows = list(self._client.export_rollout(self.rollout_id, format="steps"))
        calls = {
            step["step_id"]: step for step in self._client.steps(self.rollout_id)
        }  # later: the agent may still run
        for row in rows:
            call = calls[row["step_id"]]
            choices = (call["response"] or {}).get("choices", [])
            yield TrainingTurn(
                node_id=f"{row['step_id']}/{row['choice']}",
                prompt_token_ids=row["prompt_ids"],
                completion_token_ids=row["ids"],
                per_token_logps=row["logprobs"],
                loss_mask=[0] * len(row["prompt_ids"]) + [1] * len(row["ids"]),
                request=call["request"],
                response={"choices": [it for it in choices if it.get("index") == row["choice"]]},
                metadata={"policy_version": row["policy_version"], "finish_reason": row["finish_reason"]},
            )


def main(arguments: Sequence[str]) -> TrainingTrace:
    """Run one session and print its turns."""
    parser = argparse.ArgumentParser(description="Run one session and print its turns.")
    parser.add_argument("--url", default="http://127.0.0.1:8400")
    parser.add_argument("command", nargs="+", help="of the agent, after --")
    options = parser.parse_args(arguments)
    session = Sessions(options.url, options.command, lambda _task, _messages: None, sampling={}).create("Hello")
    try:
        session.wait_for_completion()
        trace = session.fetch_training_trace()
        session.verify([])
    finally:
        session.close()
    for turn in trace.turns:
        print(f"{turn.node_id}: {len(turn.prompt_token_ids)} prompt tokens, {sum(turn.loss_mask)} trained")
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
