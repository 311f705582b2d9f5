"""The outline of a rollout's tree: what `GET /rollouts/{id}/tree` shows.

Holds the JSON-ready picture of nodes, branches, drift and what has no place. It decides nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, Final

from proxy.trajectory.drift import Drift
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.step import Choice, Step
from proxy.trajectory.tree import Node, Tree, grow

_OPENING: Final = 80  # characters of a reply: a row of a list
_WIDTH: Final = 0.5
_BINS: Final = 20  # down to -10: beyond it a token is a rarity


def outline(steps: Sequence[Step], facts: RolloutFacts, drift: Sequence[Drift] = ()) -> dict[str, Any]:
    """The tree of all steps, flagged ones too, and the drift that was found in it.

    `branches` and `owner` are those of the default export of sequences.
    """
    tree = grow(steps)
    exported = sequences(steps, facts)
    branches: dict[tuple[str, int], list[int]] = {}
    owners: dict[tuple[str, int], int] = {}
    for row in exported.rows:
        for span in row.spans:
            name = (span.step_id, span.choice)
            if row.branch not in branches.setdefault(name, []):
                branches[name].append(row.branch)
            if span.owned:
                owners[name] = row.branch
    superseded = tree.superseded()
    return {
        "rollout_id": facts.rollout_id,
        "nodes": [
            {
                **_node(node),
                "superseded": node.place in superseded,
                "branches": branches.get(node.key, []),
                "owner": owners.get(node.key),
            }
            for node in tree.nodes
        ],
        "logprobs": histogram(node.choice for node in tree.nodes),
        "drift": [asdict(boundary) for boundary in drift],
        "unplaced": [{**_call(step), "why": why} for step, why in tree.unplaced],
        "counts": _counts(steps, tree, len(exported.rows), len(drift)),
    }


def _node(node: Node) -> dict[str, Any]:
    step = node.step
    return {
        "node": node.place,
        **_call(step),
        "choice": node.choice.index,
        "parent": node.parent,
        "start": node.start,
        "end": node.end,
        "finish_reason": node.choice.finish_reason,
        "opening": _opening(step, node.choice),
    }


def _call(step: Step) -> dict[str, Any]:
    """What a row of people's time line shows of a call: when it went to the engine, and when its last byte came."""
    timing = step.timing
    ended = timing.last_byte or timing.stored
    return {
        "step_id": step.step_id,
        "index": step.index,
        "dialect": step.dialect,
        "started_ms": round((timing.sent or timing.received) * 1000),
        "ended_ms": None if ended is None else round(ended * 1000),
        "sampled": step.sampled,
        "policy_version": step.policy_version,
        "status": step.status,
        "delivered": step.delivered,
        "late": step.late,
        "exact": step.exact,
        "problems": list(step.problems),
    }


def _opening(step: Step, choice: Choice) -> str | None:
    """How a choice's reply begins; None where its text cannot be found."""
    answers = (step.response or {}).get("choices")
    for answer in answers if isinstance(answers, list) else ():
        if isinstance(answer, dict) and answer.get("index", 0) == choice.index:
            message = answer.get("message")
            text = message.get("content") if isinstance(message, dict) else answer.get("text")
            return text[:_OPENING] if isinstance(text, str) else None
    return None


def histogram(choices: Iterable[Choice]) -> dict[str, Any]:
    """How often sampled tokens had which logprob.

    `counts[i]` is of logprobs from -`width` * i down to -`width` * (i + 1); the last one of all that are lower.
    """
    counts = [0] * (_BINS + 1)
    for choice in choices:
        places = Counter(min(int(max(-value, 0.0) / _WIDTH), _BINS) for value in choice.logprobs if isfinite(value))
        for place, count in places.items():
            counts[place] += count
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
