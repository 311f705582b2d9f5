"""The pieces of a response that follow a tool call in a stream, held until the step is stored.

A call is complete for a client when the next block or item begins: Claude Code 2.1 and Codex 0.169 then run its tool, while the
rest is sampled. If the engine failed after that, a tool would have run for a response that no complete step has.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

TEXT: Final = -1  # in place of the index of a call: reasoning or text

Piece: TypeAlias = tuple[int, Callable[[], bytes]]  # the index of its call or TEXT, and what writes its events


class HeldPieces:
    """Writes pieces as they arrive until a call is open; then only those of this call, and the others at the end."""

    __slots__ = ("_held", "open_call")

    def __init__(self) -> None:
        self.open_call: int | None = None  # its index
        self._held: dict[int, list[Callable[[], bytes]]] = {}

    @property
    def calls(self) -> list[int]:
        """The indices of the held calls, in the order in which they began."""
        return [index for index in self._held if index != TEXT]

    def take(self, pieces: Iterable[Piece]) -> bytes:
        """Return the events of the pieces that are not held. What writes a call sets `open_call`."""
        events = []
        for index, write in pieces:
            if self.open_call is None or self.open_call == index:
                events.append(write())
            else:
                self._held.setdefault(index, []).append(write)
        return b"".join(events)

    def release(self) -> bytes:
        """Return the events of the held pieces, those of each call together."""
        held, self._held = self._held, {}
        return b"".join([write() for writers in held.values() for write in writers])
