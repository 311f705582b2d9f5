"""The outline of a rollout's tree, which `GET /rollouts/{id}/tree` returns."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, Final

from proxy.trajectory.drift import Drift
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.forks import KINDS, Fork, find_forks
from proxy.trajectory.sequence import sequences
from proxy.trajectory.step import DEFAULT_POLICY, Choice, Step, answers_of
from proxy.trajectory.threads import Threads, find_threads
from proxy.trajectory.tree import Node, Tree, grow

_CONTINUATION: Final = ("step_id", "choice", "kept", "bridge", "rendered", "reason")  # of the recorded facts
_OPENING: Final = 80  # characters of a reply, for one line of a list
_WIDTH: Final = 0.5
_BINS: Final = 20  # down to -10; lower logprobs are rare


def outline(
    steps: Sequence[Step],
    facts: RolloutFacts,
    drift: Sequence[Drift] = (),
    *,
    reasons: Mapping[Any, str] | None = None,
    exports: Callable[[Step], bool] | None = None,
    threads: Threads | None = None,
) -> dict[str, Any]:
    """Return the tree of all steps, including flagged ones, and the drift that was found in it.

    `branches` and `owner` are those of the default export of sequences; `exports` returns whether it has a step.
    `reasons` are the sentences for the reasons why steps were not continued (docs/continuation.md), by code.
    """
    tree = grow(steps)
    exported = sequences([step for step in steps if exports is None or exports(step)], facts, tree=tree)
    branches: dict[tuple[str, int], list[int]] = {}
    owners: dict[tuple[str, int], int] = {}
    for number, branch in enumerate(exported.branches):
        for node in branch.path:
            branches.setdefault(node.key, []).append(number)
            if node.position in branch.owned:
                owners[node.key] = number
    superseded = tree.superseded()
    forks = find_forks(tree, {boundary.step_id for boundary in drift})
    continuations = {step.step_id: found for step in steps if (found := _continuation(step, reasons or {}))}
    threads = threads or find_threads(steps)
    calls = {step.step_id: (_call(step, continuations.get(step.step_id)), answers_of(step)) for step in steps}
    for step_id, (call, _) in calls.items():
        call["thread"] = threads.of[step_id].name
    return {
        "rollout_id": facts.rollout_id,
        "nodes": [
            {
                **_node(node, *calls[node.step.step_id]),
                "superseded": node.position in superseded,
                "branches": branches.get(node.key, []),
                "owner": owners.get(node.key),
                **({"fork": _shown_fork(fork)} if (fork := forks.get(node.key)) else {}),
            }
            for node in tree.nodes
        ],
        "logprobs": histogram(node.choice for node in tree.nodes),
        "drift": [_boundary(boundary, continuations.get(boundary.step_id, {})) for boundary in drift],
        "unplaced": [{**calls[step.step_id][0], "why": why} for step, why in tree.unplaced],
        "threads": [thread.as_json() for thread in threads.all],
        "counts": _counts(steps, tree, len(exported.branches), len(drift)),
    }


def _node(node: Node, call: Mapping[str, Any], answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "node": node.position,
        **call,
        "choice": node.choice.index,
        "parent": node.parent,
        "start": node.start,
        "end": node.end,
        "finish_reason": node.choice.finish_reason,
        "opening": _opening(answers.get(node.choice.index, {})),
    }


def _shown_fork(fork: Fork) -> dict[str, Any]:
    """Return why a step is a fork, with the sentence for its kind."""
    return {**{name: value for name, value in asdict(fork).items() if value is not None}, "why": KINDS[fork.kind]}


def _boundary(boundary: Drift, continuation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drift boundary, with the reason why its step was not continued, if there is one."""
    return {**asdict(boundary), **{name: continuation[name] for name in ("reason", "why") if name in continuation}}


def _call(step: Step, continuation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a call for the time line.

    `started_ms` is when it was sent, `ended_ms` when its last byte arrived.
    """
    timing = step.timing
    ended = timing.last_byte or timing.stored
    return {
        "step_id": step.step_id,
        "index": step.index,
        "dialect": step.dialect,
        "started_ms": round((timing.sent or timing.received) * 1000),
        "first_byte_ms": None if timing.first_byte is None else round(timing.first_byte * 1000),
        "ended_ms": None if ended is None else round(ended * 1000),
        "sampled": step.sampled,
        **({} if step.policy == DEFAULT_POLICY else {"policy": step.policy, "model": step.model_served}),
        "policy_version": step.policy_version,
        **({"policy_epoch": step.policy_epoch} if step.policy_epoch else {}),
        "status": step.status,
        "delivered": step.delivered,
        "late": step.late,
        "exact": step.exact,
        "problems": list(step.problems),
        **({} if continuation is None else {"continuation": continuation}),
    }


def _continuation(step: Step, reasons: Mapping[Any, str]) -> dict[str, Any] | None:
    """Return how a step continues an earlier one by ids, or the reason why it does not; None if neither is recorded."""
    recorded = step.extra.get("continuation")
    if not isinstance(recorded, Mapping):
        return None
    shown = {name: recorded[name] for name in _CONTINUATION if recorded.get(name) is not None}
    return {**shown, "why": reasons.get(shown["reason"], shown["reason"])} if "reason" in shown else shown


def _opening(answer: Mapping[str, Any]) -> str | None:
    """Return the beginning of a choice's reply; None if it has no text."""
    message = answer.get("message")
    text = message.get("content") if isinstance(message, dict) else answer.get("text")
    return text[:_OPENING] if isinstance(text, str) else None


def histogram(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the histogram of the logprobs of sampled tokens.

    `counts[i]` is of logprobs from -`width` * i down to -`width` * (i + 1); the last one includes all lower ones.
    """
    counts = [0] * (_BINS + 1)
    for choice in choices:
        places = Counter(int(min(max(-value, 0.0) / _WIDTH, _BINS)) for value in choice.logprobs if isfinite(value))
        for position, count in places.items():
            counts[position] += count
    return {"width": _WIDTH, "counts": counts}


def _counts(steps: Sequence[Step], tree: Tree, rows: int, drift: int) -> dict[str, int]:
    return {
        "steps": len(steps),
        "nodes": len(tree.nodes),
        "roots": sum(node.parent is None for node in tree.nodes),
        "leaves": len(tree.leaves),
        "sequences": rows,
        "drift": drift,
        "unplaced": len(tree.unplaced),
    }
