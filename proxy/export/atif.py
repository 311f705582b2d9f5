"""Harbor's ATIF (v1.8, harbor 0.25): a trajectory for each rollout, with token ids and logprobs; and Harbor's RolloutDetail.

The main thread's trajectory embeds the others, and the result of the tool call that started one refers to it. `extra` contains
the reward, the group and the thread. `agent_name` and `agent_version` in the metadata name the agent.

`rollout_detail` lists the prompt, the completion and the logprobs of each turn of a thread, the main thread first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Final

from proxy.export.atif_steps import Conversation, Result
from proxy.export.base import IDS, JSON, LOGPROBS, PLAIN, TEXT, Columns, Fill, Format, Plan, skipped_rows
from proxy.export.sequence_view import RowSource
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.fidelity import is_unlogged
from proxy.trajectory.sequence import Options, Skipped, select
from proxy.trajectory.step import Choice, Step
from proxy.trajectory.threads import MAIN, Thread, find_threads

_VERSION: Final = "ATIF-v1.8"
_UNKNOWN: Final = "unknown"


@dataclass(slots=True)
class _Told:
    """The conversation of a thread, and its calls that are in it."""

    thread: Thread
    name: str
    conversation: Conversation
    calls: list[tuple[Step, Choice]]

    @property
    def kind(self) -> str:
        """The kind of the thread. Rules may have given it, so that its name has precedence."""
        kind, _, digest = self.name.partition(":")
        return kind if digest or kind == MAIN else self.thread.kind


class _ByThread(Format):
    """A format whose rows are conversations: those of each thread, without replies that the agent abandoned."""

    by_thread = True
    whole = True

    def told(self, steps: Sequence[Step], options: Options) -> tuple[list[_Told], list[Skipped]]:
        """Return the threads of a rollout as conversations, the main one first, and the steps that are in none."""
        chosen, skipped = select(steps, options)
        threads = find_threads({step.step_id: step for step, _ in chosen}.values())
        found: dict[str, _Told] = {}
        for _, choices in groupby(chosen, key=lambda call: call[0].step_id):
            calls = list(choices)
            step, thread = calls[0][0], threads.of[calls[0][0].step_id]
            name = step.thread or thread.name
            told = found.setdefault(name, _Told(thread, name, Conversation(), []))
            told.conversation.add(step, [choice for _, choice in calls])
        for told in found.values():
            told.calls = told.conversation.calls
        kept = {step.step_id: choice.index for told in found.values() for step, choice in told.calls}
        for step, choice in chosen:
            if step.step_id not in kept:
                skipped.append(Skipped(step.step_id, "the conversation continued without its reply", len(choice.ids)))
            elif kept[step.step_id] != choice.index:
                why = f"choice {choice.index} of the call is in no conversation"
                skipped.append(Skipped(step.step_id, why, len(choice.ids)))
        order = {thread.name: number for number, thread in enumerate(threads.all)}
        return sorted(found.values(), key=lambda told: (told.name != MAIN, order[told.thread.name])), skipped


class AtifFormat(_ByThread):
    """One trajectory for each rollout. `branches`, `max_len` and `row_weight` apply to joined rows only."""

    name = "atif"
    reward_place = "turn"
    has_images = True  # in its messages
    columns: ClassVar[Columns] = {
        "schema_version": TEXT,
        "session_id": TEXT,
        "trajectory_id": TEXT,
        "agent": JSON,
        "steps": JSON,
        "final_metrics": JSON,
        "extra": JSON,
        "subagent_trajectories": JSON,
    }

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan the trajectory of a rollout; a rollout without exported steps has none."""
        threads, skipped = self.told(steps, options)
        trained = tuple(step.step_id for told in threads for step, _ in told.calls)
        rows = [trained] if threads else []
        return Plan(rows, skipped_rows(skipped), lambda: iter([_trajectory(facts, threads)] if threads else []))


def _trajectory(facts: RolloutFacts, threads: Sequence[_Told]) -> dict[str, Any]:
    main, others = threads[0], threads[1:]
    results = {key: found for told in threads for key, found in told.conversation.results().items()}
    for told in others:
        _refer(told, facts, results)
    embedded = [_document(facts, told) for told in others]
    return {**_document(facts, main), "subagent_trajectories": embedded or None}


def _refer(told: _Told, facts: RolloutFacts, results: Mapping[tuple[str, str, str], Mapping[str, Result]]) -> None:
    """Let the result of the tool call that started a thread refer to its trajectory.

    Of several calls whose arguments begin alike, it is the one whose argument is in the prompt of the thread.
    """
    thread = told.thread
    found = results.get((thread.started_by or "", thread.tool or "", thread.title))
    if found is None:
        return
    prompt = told.conversation.prompt
    result = found.get(prompt.strip())  # one that is the prompt is found without a search for each
    result = result or next((result for text, result in found.items() if text in prompt), next(iter(found.values())))
    reference = {"trajectory_id": _trajectory_id(facts, told), "session_id": facts.rollout_id}
    result().setdefault("subagent_trajectory_ref", []).append(reference)


def _trajectory_id(facts: RolloutFacts, told: _Told) -> str:
    return f"{facts.rollout_id}/{told.name}"


def _document(facts: RolloutFacts, told: _Told) -> dict[str, Any]:
    """Return the trajectory of a thread."""
    of_thread = facts.of_thread(told.name)
    steps = told.conversation.steps
    for step in steps:
        reward = facts.step_reward(step.get("extra", {}).get("step_id", ""))
        if reward is not None:
            step["extra"] = {**step["extra"], "reward": reward}
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    extra = {
        "thread": told.name,
        "kind": told.kind,
        "reward": of_thread.reward,
        "group_id": facts.group_id,
        "status": facts.status,
        "metadata": dict(facts.metadata),
    }
    return {
        "schema_version": _VERSION,
        "session_id": facts.rollout_id,
        "trajectory_id": _trajectory_id(facts, told),
        "agent": _agent(facts.metadata, told),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
            "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
            "total_cached_tokens": sum(each.get("cached_tokens", 0) for each in metrics),
            "total_steps": len(steps),
        },
        "extra": {name: value for name, value in extra.items() if value not in (None, {})},
    }


def _agent(metadata: Mapping[str, Any], told: _Told) -> dict[str, Any]:
    """Return the agent, with the tools of its last call."""
    name, version = metadata.get("agent_name"), metadata.get("agent_version")
    tools = told.calls[-1][0].body.get("tools") if told.calls else None
    agent = {
        "name": told.thread.agent or (name if isinstance(name, str) and name else _UNKNOWN),
        "version": version if isinstance(version, str) and version else _UNKNOWN,
        "model_name": told.thread.model,
        "tool_definitions": [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else None,
    }
    return {name: value for name, value in agent.items() if value is not None}


class RolloutDetailFormat(_ByThread):
    """One RolloutDetail for each thread; its lists have an entry for each turn."""

    name = "rollout_detail"
    columns: ClassVar[Columns] = {
        "prompt_token_ids": [IDS],
        "completion_token_ids": [IDS],
        "logprobs": [LOGPROBS],
        "extra": {"step_id": [TEXT], "policy_version": [TEXT]},
    }

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan the rows. Rendering raises Inexpressible for a turn without logprobs."""
        self.check_images(facts, steps)
        threads, skipped = self.told(steps, options)
        threads = [told for told in threads if told.calls]
        source = RowSource(self.name, facts, {step.step_id: step for step in steps}, fill)

        def rendered() -> Iterator[Any]:
            for told in threads:
                yield _detail(told, source)

        trained = [tuple(step.step_id for step, _ in told.calls) for told in threads]
        return Plan(trained, skipped_rows(skipped), rendered, threads=[told.name for told in threads])


def _detail(told: _Told, source: RowSource) -> dict[str, Any]:
    for step, _ in told.calls:
        if is_unlogged(step):
            raise source.refuse_unlogged(f"step {step.step_id!r}")
    return {
        "prompt_token_ids": [step.prompts[choice.prompt].tolist() for step, choice in told.calls],
        "completion_token_ids": [choice.ids.tolist() for _, choice in told.calls],
        "logprobs": [choice.logprobs.tolist() for _, choice in told.calls],
        "extra": {
            "step_id": [step.step_id for step, _ in told.calls],
            "policy_version": [step.policy_version for step, _ in told.calls],
        },
    }
