"""The tree of a rollout: which step continues which, by token ids only.

Rule 1: a node is one choice of one step; its full ids are its prompt and the sampled ids. A choice without sampled ids is no
        node: it has nothing to train, and its prompt has all that could be continued.
Rule 2: the prompt of a step begins with its parent's full ids; of several such nodes, the LONGEST is the parent. Ids decide,
        never text or messages. Of nodes with the same ids, a trainable one comes before others, then the oldest. The tree
        therefore does not depend on the order in which steps arrived.
Rule 3: only steps of one policy join, and only of one thread if threads are known, also if ids are equal: the tree of a rollout
        is the union of the trees of its policies and threads.
        Steps with different images do not join either: every image has the same placeholder ids (`images.distinct`).
Rule 4: nothing is recursive: a rollout may be thousands of steps deep. Nothing stores the full ids of all nodes: growing
        prompts would make that quadratic. `Prefixes` indexes sequences of ids by pieces of 256, the units of stored chains:
        prompts that share a chain are compared by its links, so that time and memory are linear in the unique tokens.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from typing import Any

from msgspec import Struct

from proxy.trajectory.arrays import Ids, Link, Prompt, SharedIds, to_little_endian
from proxy.trajectory.blocks import UNIT_BYTES
from proxy.trajectory.images import IMAGES, distinct
from proxy.trajectory.step import Choice, Step

Key = tuple[str, int]


class _Spot:
    """A sequence of whole pieces."""

    __slots__ = ("ending", "links", "nearest", "parent", "piece", "rests")

    def __init__(self, parent: "_Spot | None", piece: bytes) -> None:
        self.parent = parent
        self.piece = piece
        self.ending: dict[bytes, int] = {}  # indexed sequences that end within the next piece, by their remaining bytes
        self.rests: list[bytes] = []  # these bytes in order, once `ending` is complete
        self.links: list[int] = []  # the index of the longest other rest that each begins with, or -1
        self.nearest: tuple[_Spot, int] | bool | None = False  # False: not searched yet

    def longest(self, rest: bytes) -> int:
        """Return the index in the sorted rests of the longest one that `rest` begins with; -1 if there is none."""
        if len(self.rests) < len(self.ending):
            self._sort()
        # All that sorts between a prefix of `rest` and `rest` begins with that prefix too.
        index = bisect_right(self.rests, rest) - 1
        while index >= 0 and not rest.startswith(self.rests[index]):
            index = self.links[index]
        return index

    def above(self) -> "tuple[_Spot, int] | None":
        """Return the longest indexed sequence that ends before this one and is a prefix of it, as spot and index."""
        path: list[_Spot] = []
        spot, found = self, None
        while spot.parent is not None:
            if not isinstance(spot.nearest, bool):
                found = spot.nearest
                break
            path.append(spot)
            index = spot.parent.longest(spot.piece)
            if index >= 0:
                found = (spot.parent, index)
                break
            spot = spot.parent
        for visited in path:
            visited.nearest = found
        return found

    def _sort(self) -> None:
        self.rests, self.links = sorted(self.ending), []
        inside: list[int] = []
        for index, rest in enumerate(self.rests):
            while inside and not rest.startswith(self.rests[inside[-1]]):
                inside.pop()
            self.links.append(inside[-1] if inside else -1)
            inside.append(index)


class Prefixes:
    """An index of numbered id sequences. All of them are added before the first lookup."""

    def __init__(self) -> None:
        self._root = _Spot(None, b"")
        self._next: dict[tuple[int, bytes], _Spot] = {}
        self._of_links: dict[int, tuple[Link, _Spot]] = {}  # by id(): the links are referenced here, so no id is reused

    def locate(self, prompt: Prompt) -> tuple[_Spot, bytes]:
        """Return the location where a prompt ends: equal for equal ids."""
        if not isinstance(prompt, SharedIds):
            return self._onwards(self._root, to_little_endian(prompt))
        fresh: list[Link] = []
        spot = self._root
        for link in prompt.links():
            known = self._of_links.get(id(link))
            if known is not None:
                spot = known[1]
                break
            if len(link.piece) % UNIT_BYTES:  # a chain with other pieces
                return self._onwards(self._root, to_little_endian(prompt.to_array()))
            fresh.append(link)
        for link in reversed(fresh):
            spot, _ = self._onwards(spot, link.piece)
            self._of_links[id(link)] = (link, spot)
        return self._onwards(spot, prompt.tail)

    def add(self, location: tuple[_Spot, bytes], ids: Ids, number: int) -> int:
        """Index the sequence of these ids after a located prompt; return its number.

        If the same ids were added before, that is their number.
        """
        spot, rest = self._onwards(location[0], location[1] + to_little_endian(ids))
        return spot.ending.setdefault(rest, number)

    @staticmethod
    def beginnings(location: tuple[_Spot, bytes]) -> Iterator[int]:
        """Return the numbers of the indexed sequences that a located prompt begins with, the longest first."""
        spot, rest = location
        index = spot.longest(rest)
        found = (spot, index) if index >= 0 else spot.above()
        while found is not None:
            spot, index = found
            while index >= 0:
                yield spot.ending[spot.rests[index]]
                index = spot.links[index]
            found = spot.above()

    def _onwards(self, spot: _Spot, raw: bytes) -> tuple[_Spot, bytes]:
        whole = len(raw) - len(raw) % UNIT_BYTES
        for start in range(0, whole, UNIT_BYTES):
            key = id(spot), raw[start : start + UNIT_BYTES]
            spot = self._next.get(key) or self._next.setdefault(key, _Spot(spot, key[1]))
        return spot, raw[whole:]


def earlier_attempts(steps: Iterable[Step]) -> dict[str, str]:
    """Return the previous attempt of each retry, by step id.

    `retry_of` of a step is authoritative. A step that only has an attempt number N follows attempt N - 1 with the same
    body: one that has no successor yet and was not delivered, the oldest first. A delivered one is followed only if it
    is the only one: of several equal concurrent calls it is unknown which was retried, and a rejected attempt has no
    step.
    """
    ordered = sorted(steps, key=lambda step: step.step_id)
    pairs = {step.step_id: step.extra["retry_of"] for step in ordered if "retry_of" in step.extra}
    unpaired = [step for step in ordered if _attempt(step) and step.step_id not in pairs]
    if not unpaired:
        return pairs
    free: defaultdict[tuple[Any, int], deque[Step]] = defaultdict(deque)
    followed = set(pairs.values())
    for step in sorted(ordered, key=lambda step: (arrived(step), step.step_id)):
        if step.step_id not in followed:
            free[step.extra.get("request_key"), _attempt(step)].append(step)
    for step in unpaired:
        before = free.get((step.extra.get("request_key"), _attempt(step) - 1))
        if before and (len(before) == 1 or not arrived(before[0])):
            pairs[step.step_id] = before.popleft().step_id
    return pairs


def arrived(step: Step) -> bool:
    """Return whether the client received the complete response, as far as is known."""
    return step.delivered and step.status == "complete"


def _attempt(step: Step) -> int:
    return int(step.extra.get("attempt", 0))


class Node(Struct, frozen=True):
    """One choice of one step."""

    position: int  # in the tree's nodes, which are ordered by age
    parent: int | None  # the position of its parent
    step: Step
    choice: Choice
    start: int  # the position of its first sampled id in its full ids
    end: int  # the length of its full ids

    @property
    def key(self) -> Key:
        """The identity of the node, which sorts by age: step ids sort by time."""
        return self.step.step_id, self.choice.index

    @property
    def prompt(self) -> Prompt:
        """The ids before its sampled ids."""
        return self.step.prompts[self.choice.prompt]


@dataclass(frozen=True, slots=True)
class _Index:
    spots: list[tuple[_Spot, bytes]]  # the location of each node's prompt in the index of prefixes
    same: list[int]  # for each node the one that represents its full ids


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes of steps, and how they join."""

    nodes: tuple[Node, ...]  # by age
    children: tuple[tuple[int, ...], ...]  # of each node
    unplaced: tuple[tuple[Step, str], ...]  # the steps without a node, with the reason
    # None if the tree is one path: each node then begins with all nodes before it, and no two have the same ids.
    _index: _Index | None = field(compare=False, repr=False)

    @property
    def leaves(self) -> list[Node]:
        """The nodes without children, the oldest first."""
        return [node for node in self.nodes if not self.children[node.position]]

    def nodes_of(self, step: Step) -> list[Node]:
        """Return the nodes of one step, by index of their choice."""
        first = bisect_left(self.nodes, step.step_id, key=lambda node: node.step.step_id)
        return list(takewhile(lambda node: node.step is step, islice(self.nodes, first, None)))

    def path(self, leaf: Node) -> list[Node]:
        """Return the nodes from the root to this node."""
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(self.nodes[parent])
        return path[::-1]

    def same(self, node: Node) -> int:
        """Return the position of the node that represents all nodes with the full ids of this one."""
        return node.position if self._index is None else self._index.same[node.position]

    def beginnings(self, node: Node) -> Iterator[int]:
        """Return the places (see `same`) of all nodes with full ids that begin this node's prompt, the longest first."""
        if self._index is None:
            return iter(range(node.position - 1, -1, -1))
        return Prefixes.beginnings(self._index.spots[node.position])

    def superseded(self) -> frozenset[int]:
        """Return the leaves that a retry replaced and that nothing continues.

        Either the two have the same prompt ids and the same request, and the other was used instead: it was continued,
        or it was delivered while this one was not. Or the client declared the other a retry of this one: then it is
        enough that the other was delivered.
        """
        found = set(self._retried())
        if self._index is not None:
            twins: dict[Any, list[Node]] = {}
            for node, (spot, rest) in zip(self.nodes, self._index.spots, strict=True):
                twins.setdefault((request_key(node.step), id(spot), rest), []).append(node)
            for similar in twins.values():
                if similar[0].step is not similar[-1].step:
                    found.update(self._replaced(similar))
        return frozenset(found)

    def _retried(self) -> Iterator[int]:
        """Return the nodes of calls that their client declared as retried, if the later attempt was used."""
        calls = {
            step.step_id: step for step in (*(node.step for node in self.nodes), *(step for step, _ in self.unplaced))
        }
        by_policy: defaultdict[str, list[Step]] = defaultdict(list)
        for step in calls.values():
            by_policy[step.policy].append(step)
        pairs = (pair for steps in by_policy.values() for pair in earlier_attempts(steps).items())
        earlier = {
            later: before for later, before in pairs if before in calls and calls[before].policy == calls[later].policy
        }
        if not earlier:
            return
        continued = {node.step.step_id for node in self.nodes if self.children[node.position]}
        replaced: set[str] = set()
        for step_id in earlier:
            if arrived(calls[step_id]) or step_id in continued:
                while (step_id := earlier.get(step_id, "")) and step_id not in replaced:
                    replaced.add(step_id)
        yield from (node.position for node in self.nodes if node.step.step_id in replaced - continued)

    def _replaced(self, group: list[Node]) -> Iterator[int]:
        """Return the nodes of this group that another one replaced.

        Nodes have the same request and prompt ids, and are sorted by age.
        """
        continued = {node.step.step_id for node in group if self.children[node.position]}
        some_arrived = any(arrived(node.step) for node in group)
        for node in group:
            replaced = bool(continued) or (some_arrived and not arrived(node.step))
            if replaced and node.step.step_id not in continued:
                yield node.position


def grow(steps: Iterable[Step]) -> Tree:
    """Join steps into their tree. Every step must be of one rollout; their order does not matter."""
    ordered = sorted(steps, key=lambda step: step.step_id)
    unplaced = tuple((step, why) for step in ordered if (why := _why_unplaced(step)) is not None)
    return plant(((step, choice) for step in ordered for choice in step.choices if placeable(step, choice)), unplaced)


def plant(chosen: Iterable[tuple[Step, Choice]], unplaced: tuple[tuple[Step, str], ...] = ()) -> Tree:
    """Return the tree of these choices only; each must be `placeable`. Omitted choices are context of later ones."""
    placed = sorted(chosen, key=lambda pair: (pair[0].step_id, pair[1].index))
    if _is_path(placed):
        parents: list[int | None] = [None, *range(len(placed) - 1)] if placed else []
        index = None
    else:
        index = _index(placed)
        parents = [next(Prefixes.beginnings(spot), None) for spot in index.spots]
    nodes = []
    children: list[list[int]] = [[] for _ in placed]
    for position, ((step, choice), parent) in enumerate(zip(placed, parents, strict=True)):
        start = len(step.prompts[choice.prompt])
        nodes.append(Node(position, parent, step, choice, start, start + len(choice.ids)))
        if parent is not None:
            children[parent].append(position)
    return Tree(tuple(nodes), tuple(map(tuple, children)), unplaced, index)


def _is_path(placed: Sequence[tuple[Step, Choice]]) -> bool:
    """Return whether each prompt begins with the full ids of the choice before; False also if only the index can show it."""
    for (step, choice), (later, following) in pairwise(placed):
        if (step.policy, step.thread) != (later.policy, later.thread) or IMAGES in later.extra:
            return False
        before, prompt = step.prompts[choice.prompt], later.prompts[following.prompt]
        if not isinstance(prompt, SharedIds) or not isinstance(before, SharedIds):
            return False
        rest = prompt.after(before)
        if rest is None or not rest.startswith(to_little_endian(choice.ids)):
            return False
    return True


def _index(placed: Sequence[tuple[Step, Choice]]) -> _Index:
    # by policy and thread, and images of unknown places
    prefixes: defaultdict[tuple[str, str | None, str], Prefixes] = defaultdict(Prefixes)
    located: dict[Any, tuple[_Spot, bytes]] = {}  # by id(): the choices of a step share their prompts
    spots = []
    joined: list[Prefixes] = []  # of each node
    for step, choice in placed:
        prompt = step.prompts[choice.prompt]
        images, ids = distinct(step, prompt) if IMAGES in step.extra else ("", prompt)
        key = step.policy, step.thread, step.step_id if ids is not prompt else images, id(prompt)
        joined.append(prefixes[step.policy, step.thread, images])
        if key not in located:
            located[key] = joined[-1].locate(ids)
        spots.append(located[key])
    same = [0] * len(placed)
    # Of nodes with the same ids, the first one that is added may be a parent (rule 2).
    for position in sorted(range(len(placed)), key=lambda position: not placed[position][0].trainable):
        _, choice = placed[position]
        same[position] = joined[position].add(spots[position], choice.ids, position)
    return _Index(spots, same)


def placeable(step: Step, choice: Choice) -> bool:
    """Return whether a choice can be a node: it has sampled ids and a prompt."""
    return len(choice.ids) > 0 and 0 <= choice.prompt < len(step.prompts)


def request_key(step: Step) -> Any:
    """Return a key that is equal for equal requests: the recorder's, or else the identity of the object."""
    return step.extra.get("request_key") or id(step.request)


def _why_unplaced(step: Step) -> str | None:
    for choice in step.choices:
        if placeable(step, choice):
            return None
    if step.status == "error":
        return "the engine returned an error"
    return "no token was sampled" if step.prompts else "the engine returned no prompt ids"
