"""The tree of a rollout: which step goes on from which, by token ids alone.

Holds the joining of steps, and what can be said of the tree as such. It neither builds rows nor judges fidelity.

Rule 1: a node is one choice of one step; its full ids are its prompt and what was sampled. A choice without sampled ids
        is no node: it has nothing to train, and nothing to go on from that its own prompt does not hold.
Rule 2: a step hangs under the node whose full ids are the LONGEST prefix of its prompt; of equals, under the oldest.
        Ids decide, never text, messages or time. So the tree does not depend on the order in which steps arrived.
Rule 3: nothing recurses: a rollout may be thousands of steps deep.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from proxy.trajectory.step import Choice, Ids, Step

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Node:
    """One choice of one step. `place` and `parent` are indexes into the tree's nodes, which are in order of age."""

    place: int
    parent: int | None
    step: Step
    choice: Choice

    @property
    def key(self) -> Key:
        """Its name, and its age: step ids sort by time."""
        return self.step.step_id, self.choice.index

    @property
    def prompt(self) -> Ids:
        """The ids it was sampled after."""
        return self.step.prompts[self.choice.prompt]

    @property
    def start(self) -> int:
        """Where its sampled ids begin in its full ids."""
        return len(self.prompt)

    @property
    def end(self) -> int:
        """How long its full ids are."""
        return len(self.prompt) + len(self.choice.ids)


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes in order of age, the children of each, and the steps that have no node, with the reason."""

    nodes: tuple[Node, ...]
    children: tuple[tuple[int, ...], ...]
    unplaced: tuple[tuple[Step, str], ...]

    @property
    def leaves(self) -> list[Node]:
        """The nodes that nothing goes on from, the oldest first."""
        return [node for node in self.nodes if not self.children[node.place]]

    def nodes_of(self, step: Step) -> list[Node]:
        """The nodes of one step, by index of their choice."""
        first = bisect_left(self.nodes, step.step_id, key=lambda node: node.step.step_id)
        return list(takewhile(lambda node: node.step is step, islice(self.nodes, first, None)))

    def path(self, leaf: Node) -> list[Node]:
        """From the root down to this node."""
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(self.nodes[parent])
        return path[::-1]

    def superseded(self) -> frozenset[int]:
        """The leaves that a retry replaced: same prompt ids and same request, and the other one was taken instead.

        The other was taken if it went on while this one did not, or if it was delivered while this one was not.
        """
        twins: dict[Any, list[Node]] = {}
        for node in self.nodes:
            twins.setdefault((request_key(node.step), node.prompt.tobytes()), []).append(node)
        return frozenset(
            leaf.place
            for group in twins.values()
            if len(group) > 1
            for leaf in group
            if not self.children[leaf.place] and any(self._replaces(other, leaf) for other in group)
        )

    def _replaces(self, other: Node, leaf: Node) -> bool:
        if other.step.step_id == leaf.step.step_id:
            return False  # choices of one call are no retries of each other
        return bool(self.children[other.place]) or (_was_taken(other.step) and not _was_taken(leaf.step))


def grow(steps: Iterable[Step]) -> Tree:
    """Join steps into their tree. Every step must be of one rollout; their order does not matter."""
    ordered = sorted(steps, key=lambda step: step.step_id)
    placed = [(step, choice) for step in ordered for choice in _placeable(step)]
    parents = _parents(placed)
    nodes = tuple(Node(place, parent, *placed[place]) for place, parent in enumerate(parents))
    children: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        if node.parent is not None:
            children[node.parent].append(node.place)
    unplaced = tuple((step, why) for step in ordered if (why := _why_unplaced(step)) is not None)
    return Tree(nodes, tuple(map(tuple, children)), unplaced)


def request_key(step: Step) -> Any:
    """A name for the request: equal for equal requests. The recorder gives one; else the object itself is the name."""
    return step.extra.get("request_key") or id(step.request)


def _was_taken(step: Step) -> bool:
    return step.delivered and step.status == "complete"


def _placeable(step: Step) -> list[Choice]:
    """The choices of a step that can be nodes, in order of their index."""
    found = [choice for choice in step.choices if choice.ids and choice.prompt < len(step.prompts)]
    return sorted(found, key=lambda choice: choice.index)


def _why_unplaced(step: Step) -> str | None:
    if _placeable(step):
        return None
    if step.status == "error":
        return "the engine answered with an error"
    return "nothing was sampled" if step.prompts else "the engine gave no prompt ids"


def _parents(placed: Sequence[tuple[Step, Choice]]) -> list[int | None]:
    """The parent of each node: one sort and one sweep.

    In byte order, everything that begins with some ids follows them directly. So when prompts and full ids are sorted
    together, a stack of the full ids that the sweep is inside of has the longest prefix on top. Ids are four bytes each,
    so a prefix in bytes, of whole ids, is a prefix in ids.
    """
    texts: list[tuple[bytes, int, int]] = []  # full ids (0) come before an equal prompt (1); the oldest comes first
    prompts: dict[tuple[str, int], bytes] = {}
    for place, (step, choice) in enumerate(placed):
        name = (step.step_id, choice.prompt)
        if name not in prompts:
            prompts[name] = step.prompts[choice.prompt].tobytes()
        texts.append((prompts[name] + choice.ids.tobytes(), 0, place))
        texts.append((prompts[name], 1, place))
    texts.sort()
    parents: list[int | None] = [None] * len(placed)
    inside: list[tuple[bytes, int]] = []
    for text, is_prompt, place in texts:
        while inside and not text.startswith(inside[-1][0]):
            inside.pop()
        if is_prompt:
            parents[place] = inside[-1][1] if inside else None
        elif not inside or inside[-1][0] != text:
            inside.append((text, place))
    return parents
