"""Token ids with shared prefixes: the prompts of a growing rollout in memory linear in its unique tokens."""

import sys
from array import array
from collections.abc import Iterator
from typing import Any, overload


class Link:
    """A piece of little-endian int32 ids that follows `parent`; `size` is the number of bytes from the chain's beginning."""

    __slots__ = ("parent", "piece", "size")

    def __init__(self, parent: "Link | None", piece: bytes) -> None:
        self.parent = parent
        self.piece = piece
        self.size: int = len(piece) + (0 if parent is None else parent.size)


class SharedIds:
    """Token ids as a chain of shared pieces and a separate tail. It reads like an `array('i')` and is immutable.

    Reading an item copies all ids: call `to_array()` once if several are needed. Raises ValueError if the bytes are not
    whole ids.
    """

    __slots__ = ("_length", "end", "tail")

    def __init__(self, end: Link | None, tail: bytes) -> None:
        size = len(tail) + (0 if end is None else end.size)
        if size % 4:
            raise ValueError("the number of bytes is not a multiple of 4")
        self.end = end
        self.tail = tail
        self._length = size // 4

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return repr(self.to_array())

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_array())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "array[int]": ...
    def __getitem__(self, at: int | slice) -> "int | array[int]":
        return self.to_array()[at]

    def __add__(self, others: "array[int]") -> "array[int]":
        joined = self.to_array()
        joined.extend(others)
        return joined

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedIds):
            if self.end is other.end or self._length != other._length:
                return self._length == other._length and self.tail == other.tail
            return self.to_array() == other.to_array()
        return self.to_array() == other if isinstance(other, array) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like an array's

    def links(self) -> Iterator[Link]:
        """Return the links of the chain, the last one first."""
        link = self.end
        while link is not None:
            yield link
            link = link.parent

    def after(self, beginning: "SharedIds") -> bytes | None:
        """Return the little-endian bytes of the ids that follow `beginning`.

        None if the ids do not begin with `beginning`, or if the chain does not begin with its chain.
        """
        pieces = [self.tail]
        link = self.end
        while link is not beginning.end:
            if link is None:
                return None
            pieces.append(link.piece)
            link = link.parent
        rest = b"".join(reversed(pieces))
        return rest[len(beginning.tail) :] if rest.startswith(beginning.tail) else None

    def to_array(self) -> "array[int]":
        """Copy all ids into an array."""
        pieces = [self.tail, *(link.piece for link in self.links())]
        ids = array("i", b"".join(reversed(pieces)))
        if sys.byteorder != "little":
            ids.byteswap()
        return ids

    def tolist(self) -> list[int]:
        """Return all ids as a list."""
        return self.to_array().tolist()

    def tobytes(self) -> bytes:
        """Return all ids in this machine's byte order."""
        return self.to_array().tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedIds, (None, b"".join(reversed([self.tail, *(link.piece for link in self.links())])))
