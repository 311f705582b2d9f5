"""Families of steps: steps whose agent, or whose model, system prompt and tools, are the same or states of the same."""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Final

from proxy.trajectory.conversation import Digests
from proxy.trajectory.openings import Opening, replies_of

_COMPARED: Final = 4  # the newest states of one conversation, and the last replies in a conversation


class Families:
    """The families of openings, which are sorted by age."""

    def __init__(self, openings: Sequence[Opening], digests: Digests) -> None:
        self._digests = digests
        self._parents: list[int] = []  # of each node, which are the different agents, or models with prompts and tools
        self._nodes: dict[Hashable, int] = {}
        self._alike: dict[Hashable, int] = {}
        self._states: defaultdict[Hashable, deque[tuple[int, Opening]]] = defaultdict(partial(deque, maxlen=_COMPARED))
        self._replied: dict[Hashable, tuple[int, Opening]] = {}
        self._members = list(map(self._added, openings))

    def of(self, at: int) -> int:
        """Return the family of an opening by its index."""
        return self._root(self._members[at])

    def _added(self, opening: Opening) -> int:
        key = (opening.agent,) if opening.agent is not None else (opening.model, opening.system.key, opening.tools)
        node = self._nodes.get(key)
        is_new = node is None
        if node is None:
            node = self._nodes[key] = len(self._parents)
            self._parents.append(node)
        if opening.agent is None:
            self._join(node, opening, is_new=is_new)
        return node

    def _join(self, node: int, opening: Opening, *, is_new: bool) -> None:
        """Join the node of an opening with those of the same family."""
        prompt = opening.model, opening.system.key
        if is_new:
            for tool in opening.tools:
                self._unite(node, self._alike.setdefault((prompt, tool), node))
        if opening.system.text:
            self._unite(node, self._alike.setdefault((prompt, opening.digest), node))
        states = self._states[opening.model, opening.digest]
        if all(self._root(node) != self._root(other) for other, _ in states):
            for other, state in states:
                if opening.tools & state.tools and opening.system.resembles(state.system, share_tools=False):
                    self._unite(node, other)
            states.append((node, opening))
        continued = self._continued(opening)
        if continued is not None:
            other, state = continued
            shares = bool(opening.tools & state.tools)
            if self._root(node) != self._root(other) and opening.system.resembles(state.system, share_tools=shares):
                self._unite(node, other)
        self._add_replies(node, opening)

    def _continued(self, opening: Opening) -> tuple[int, Opening] | None:
        """Return the step whose messages and reply an opening begins with."""
        last = opening.length - 1
        for at in range(last, max(opening.first - 1, last - _COMPARED), -1):
            found = self._replied.get(self._place(opening, at, self._digests.of(opening.message(at))))
            if found is not None:
                return found
        return None

    def _add_replies(self, node: int, opening: Opening) -> None:
        for reply in replies_of(opening.step):
            place = self._place(opening, opening.length, self._digests.of(reply))
            self._replied[place] = (node, opening)

    def _place(self, opening: Opening, at: int, reply: bytes) -> Hashable:
        """Return what identifies a reply: its conversation, its index, the message before it, and the reply itself."""
        before = self._digests.of(opening.message(at - 1)) if at else b""
        return opening.model, opening.digest, at, before, reply

    def _root(self, node: int) -> int:
        while (parent := self._parents[node]) != node:
            self._parents[node] = node = self._parents[parent]
        return node

    def _unite(self, one: int, other: int) -> None:
        low, high = sorted((self._root(one), self._root(other)))
        self._parents[high] = low
