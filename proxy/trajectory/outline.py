"""The outline of a rollout's tree: what `GET /rollouts/{id}/tree` shows.

Holds the JSON-ready picture of nodes, branches, drift and what has no place. It decides nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from proxy.trajectory.drift import Drift
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.step import Step
from proxy.trajectory.tree import Node, Tree, grow


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
        "drift": [asdict(boundary) for boundary in drift],
        "unplaced": [{"step_id": step.step_id, "why": why} for step, why in tree.unplaced],
        "counts": _counts(steps, tree, len(exported.rows), len(drift)),
    }


def _node(node: Node) -> dict[str, Any]:
    step = node.step
    return {
        "node": node.place,
        "step_id": step.step_id,
        "choice": node.choice.index,
        "parent": node.parent,
        "start": node.start,
        "end": node.end,
        "finish_reason": node.choice.finish_reason,
        "status": step.status,
        "delivered": step.delivered,
        "exact": step.exact,
        "problems": list(step.problems),
    }


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
