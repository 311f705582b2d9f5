"""The tree of a rollout: which step goes on from which, by token ids alone.

Holds the joining of steps, and what can be said of the tree as such. It neither builds rows nor judges fidelity.

Rule 1: a node is one choice of one step; its full ids are its prompt and what was sampled. A choice without sampled ids
        is no node: it has nothing to train, and nothing to go on from that its own prompt does not hold.
Rule 2: a step hangs under the node whose full ids are the LONGEST prefix of its prompt. Ids decide, never text or
        messages; of nodes with the same ids, one that may be trained comes before others, then the oldest. So the tree
        does not depend on the order in which steps arrived.
Rule 3: nothing recurses: a rollout may be thousands of steps deep. Nothing holds the full ids of all nodes: prompts that
        grow would make that quadratic.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from proxy.trajectory.prefix_index import Prefixes, Spot
from proxy.trajectory.step import Choice, Prompt, Step


def earlier_attempts(steps: Iterable[Step]) -> dict[str, str]:
    """Of each retry, by step id, the attempt before it.

    A step that knows (`retry_of`) has the last word. One that knows only that it is attempt N follows attempt N - 1 with
    the same body: one that nobody followed yet and that did not arrive, the oldest first. One that arrived is followed only
    if it is the only one: of several equal calls made side by side nobody can say which was made again, and an attempt
    that we refused has left no step at all.
    """
    ordered = sorted(steps, key=lambda step: step.step_id)
    pairs = {step.step_id: step.extra["retry_of"] for step in ordered if "retry_of" in step.extra}
    asking = [step for step in ordered if _attempt(step) and step.step_id not in pairs]
    if not asking:
        return pairs
    free: dict[tuple[Any, int], list[Step]] = {}
    followed = set(pairs.values())
    for step in sorted(ordered, key=lambda step: (arrived(step), step.step_id)):
        if step.step_id not in followed:
            free.setdefault((step.extra.get("request_key"), _attempt(step)), []).append(step)
    for step in asking:
        before = free.get((step.extra.get("request_key"), _attempt(step) - 1))
        if before and (len(before) == 1 or not arrived(before[0])):
            pairs[step.step_id] = before.pop(0).step_id
    return pairs


def arrived(step: Step) -> bool:
    """Whether its client got it whole, as far as anybody knows."""
    return step.delivered and step.status == "complete"


def _attempt(step: Step) -> int:
    """0 for a first attempt."""
    return int(step.extra.get("attempt", 0))


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
    def prompt(self) -> Prompt:
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
class _Index:
    """Where the nodes' prompts end in the index of prefixes, and of each node the one of the same full ids known there."""

    prefixes: Prefixes
    spots: list[tuple[Spot, bytes]]
    same: list[int]


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes in order of age, the children of each, and the steps that have no node, with the reason."""

    nodes: tuple[Node, ...]
    children: tuple[tuple[int, ...], ...]
    unplaced: tuple[tuple[Step, str], ...]
    _index: _Index = field(compare=False, repr=False)

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

    def same(self, node: Node) -> int:
        """Return the place of the one node that stands for all nodes with the full ids of this one."""
        return self._index.same[node.place]

    def beginnings(self, node: Node) -> Iterator[int]:
        """Return the places (see `same`) of all nodes whose full ids the node's prompt begins with, the longest first."""
        return self._index.prefixes.beginnings(self._index.spots[node.place])

    def superseded(self) -> frozenset[int]:
        """The leaves that a retry replaced, and that nothing goes on from.

        Either the two have the same prompt ids and the same request, and the other was taken instead: it went on, or it
        was delivered while this one was not. Or the client said that the other is a retry of this one: then it is enough
        that the other was delivered, whatever seemed to become of this one.
        """
        twins: dict[Any, list[Node]] = {}
        for node, (spot, rest) in zip(self.nodes, self._index.spots, strict=True):
            twins.setdefault((request_key(node.step), id(spot), rest), []).append(node)
        found: set[int] = set()
        for similar in twins.values():
            if similar[0].step is not similar[-1].step:
                found.update(self._replaced(similar))
        return frozenset(found.union(self._retried()))

    def _retried(self) -> Iterator[int]:
        """The nodes of calls that were made again, by their client's word, when the later attempt was taken."""
        calls = {
            step.step_id: step for step in (*(node.step for node in self.nodes), *(step for step, _ in self.unplaced))
        }
        earlier = earlier_attempts(calls.values())
        if not earlier:
            return
        continued = {node.step.step_id for node in self.nodes if self.children[node.place]}
        replaced: set[str] = set()
        for step_id in earlier:
            if arrived(calls[step_id]) or step_id in continued:
                while (step_id := earlier.get(step_id, "")) and step_id not in replaced:
                    replaced.add(step_id)
        yield from (node.place for node in self.nodes if node.step.step_id in replaced - continued)

    def _replaced(self, group: list[Node]) -> Iterator[int]:
        """Return which nodes a twin replaced, of some of the same request and the same prompt ids, in order of age."""
        continued = {node.step.step_id for node in group if self.children[node.place]}
        some_arrived = any(arrived(node.step) for node in group)
        for node in group:
            replaced = bool(continued) or (some_arrived and not arrived(node.step))
            if replaced and node.step.step_id not in continued:
                yield node.place


def grow(steps: Iterable[Step]) -> Tree:
    """Join steps into their tree. Every step must be of one rollout; their order does not matter."""
    ordered = sorted(steps, key=lambda step: step.step_id)
    unplaced = tuple((step, why) for step in ordered if (why := _why_unplaced(step)) is not None)
    return plant(((step, choice) for step in ordered for choice in step.choices if placeable(step, choice)), unplaced)


def plant(chosen: Iterable[tuple[Step, Choice]], unplaced: tuple[tuple[Step, str], ...] = ()) -> Tree:
    """The tree of these choices alone; each must be `placeable`. What is left out is context to those after it."""
    placed = sorted(chosen, key=lambda pair: (pair[0].step_id, pair[1].index))
    prefixes = Prefixes()
    located: dict[int, tuple[Spot, bytes]] = {}  # by id(): the choices of a step share their prompts
    spots = []
    for step, choice in placed:
        prompt = step.prompts[choice.prompt]
        if id(prompt) not in located:
            located[id(prompt)] = prefixes.locate(prompt)
        spots.append(located[id(prompt)])
    same = [0] * len(placed)
    # Of nodes with the same ids, the first one that is added may be a parent (rule 2).
    for place in sorted(range(len(placed)), key=lambda place: (not placed[place][0].trainable, place)):
        same[place] = prefixes.add(spots[place], placed[place][1].ids, place)
    nodes = tuple(
        Node(place, next(prefixes.beginnings(spots[place]), None), *pair) for place, pair in enumerate(placed)
    )
    children: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        if node.parent is not None:
            children[node.parent].append(node.place)
    return Tree(nodes, tuple(map(tuple, children)), unplaced, _Index(prefixes, spots, same))


def placeable(step: Step, choice: Choice) -> bool:
    """Whether a choice can be a node: it has sampled ids and a prompt."""
    return len(choice.ids) > 0 and 0 <= choice.prompt < len(step.prompts)


def request_key(step: Step) -> Any:
    """A name for the request: equal for equal requests. The recorder gives one; else the object itself is the name."""
    return step.extra.get("request_key") or id(step.request)


def _why_unplaced(step: Step) -> str | None:
    if any(placeable(step, choice) for choice in step.choices):
        return None
    if step.status == "error":
        return "the engine answered with an error"
    return "nothing was sampled" if step.prompts else "the engine gave no prompt ids"
