"""An index of token id sequences that finds those with which a prompt begins.

Sequences are indexed by pieces of 256 ids. Prompts that share a chain of pieces are compared by its links, so indexing
a rollout whose prompts grow takes time and memory linear in its unique tokens.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from proxy.trajectory.arrays import to_little_endian
from proxy.trajectory.shared_ids import Link, SharedIds
from proxy.trajectory.step import Ids, Prompt

PIECE: Final = 1024  # bytes; the unit of stored chains


class Spot:
    """A sequence of whole pieces.

    `ending` has the indexed sequences that end within the next piece, by their remaining bytes.
    """

    __slots__ = ("_links", "_rests", "ending", "nearest", "parent", "piece")

    def __init__(self, parent: "Spot | None", piece: bytes) -> None:
        self.parent = parent
        self.piece = piece
        self.ending: dict[bytes, int] = {}
        self._rests: list[bytes] | None = None
        self._links: list[int] = []
        self.nearest: tuple[Spot, int] | bool | None = False  # False: not searched yet

    def longest(self, rest: bytes) -> int:
        """Return the index in the sorted rests of the longest one that `rest` begins with; -1 if there is none."""
        if not self.ending:
            return -1
        rests = self._sorted()
        # All that sorts between a prefix of `rest` and `rest` begins with that prefix too.
        index = bisect_right(rests, rest) - 1
        while index >= 0 and not rest.startswith(rests[index]):
            index = self._links[index]
        return index

    def shorter(self, index: int) -> int:
        """Return the index of the longest other rest that the one at this index begins with, or -1."""
        return self._links[index]

    def number(self, index: int) -> int:
        """Return the number of the sequence whose rest is at this index."""
        return self.ending[self._sorted()[index]]

    def above(self) -> "tuple[Spot, int] | None":
        """Return the longest indexed sequence that ends before this one and is a prefix of it, as spot and index."""
        path: list[Spot] = []
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

    def _sorted(self) -> list[bytes]:
        """Return the rests in order, each linked to the longest other one that it begins with."""
        if self._rests is None:
            self._rests = sorted(self.ending)
            inside: list[int] = []
            for index, rest in enumerate(self._rests):
                while inside and not rest.startswith(self._rests[inside[-1]]):
                    inside.pop()
                self._links.append(inside[-1] if inside else -1)
                inside.append(index)
        return self._rests


class Prefixes:
    """An index of numbered id sequences. All of them are added before the first lookup."""

    def __init__(self) -> None:
        self._root = Spot(None, b"")
        self._next: dict[tuple[int, bytes], Spot] = {}
        self._of_links: dict[int, tuple[Link, Spot]] = {}  # by id(): the links are referenced here, so no id is reused

    def locate(self, prompt: Prompt) -> tuple[Spot, bytes]:
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
            if len(link.piece) % PIECE:  # a chain with other pieces
                return self._onwards(self._root, to_little_endian(prompt.to_array()))
            fresh.append(link)
        for link in reversed(fresh):
            spot, _ = self._onwards(spot, link.piece)
            self._of_links[id(link)] = (link, spot)
        return self._onwards(spot, prompt.tail)

    def add(self, location: tuple[Spot, bytes], ids: Ids, number: int) -> int:
        """Index the sequence of these ids after a located prompt; return its number.

        If the same ids were added before, that is their number.
        """
        spot, rest = self._onwards(location[0], location[1] + to_little_endian(ids))
        return spot.ending.setdefault(rest, number)

    @staticmethod
    def beginnings(location: tuple[Spot, bytes]) -> Iterator[int]:
        """Return the numbers of the indexed sequences that a located prompt begins with, the longest first."""
        spot, rest = location
        index = spot.longest(rest)
        found = (spot, index) if index >= 0 else spot.above()
        while found is not None:
            spot, index = found
            while index >= 0:
                yield spot.number(index)
                index = spot.shorter(index)
            found = spot.above()

    def _onwards(self, spot: Spot, raw: bytes) -> tuple[Spot, bytes]:
        whole = len(raw) - len(raw) % PIECE
        for start in range(0, whole, PIECE):
            spot = self._after(spot, raw[start : start + PIECE])
        return spot, raw[whole:]

    def _after(self, spot: Spot, piece: bytes) -> Spot:
        key = (id(spot), piece)
        found = self._next.get(key)
        if found is None:
            found = self._next[key] = Spot(spot, piece)
        return found
