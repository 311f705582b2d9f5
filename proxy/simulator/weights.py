"""Which version of the weights the engine has, and which one sampled which tokens.

Holds the label that tests and trainers move, and the spans of one call; it must not hold weights: the simulated
model stays the same whatever it is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Weights:
    """The label of the weights that sample now, and how often the calls in flight were aborted so far."""

    version: str = "default"
    aborts: int = 0


@dataclass(slots=True)
class Versions:
    """The versions of one call.

    All choices of a call sample one token a round, so a position has one version, whatever the choice.
    """

    _starts: list[tuple[int, str]] = field(default_factory=list)

    def note(self, position: int, version: str) -> None:
        """The tokens from this position on are sampled by this version."""
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((position, version))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """`weight_versions` of a choice of this length: spans over output positions, as both engines tell them."""
        ends: Sequence[int] = [start for start, _ in self._starts[1:]] + [length]
        return [
            {"version": version, "start": start, "end": min(end, length)}
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < length
        ]
