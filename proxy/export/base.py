"""What every export format answers.

Holds the `Format` protocol and what it gives. A format is a pure view: the same rollout gives the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import Options, Skipped
from proxy.trajectory.step import Step


@dataclass(frozen=True, slots=True)
class Rows:
    """JSON-ready rows of one rollout, and what no row came of."""

    rows: list[dict[str, Any]]
    skipped: list[dict[str, str]]


class Format(Protocol):
    """One export format."""

    name: str

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options) -> Rows:
        """The rows of one rollout. `steps` may come without their requests and responses."""
        ...


def skipped_rows(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    """What was left out, JSON-ready."""
    return [{"step_id": left.step_id, "why": left.why} for left in skipped]
