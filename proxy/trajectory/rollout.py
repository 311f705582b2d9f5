"""What exported rows say of their rollout.

Holds the few facts of a rollout that a row carries, and nothing of its steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """A rollout, as its rows tell of it. `step_rewards` is by step id; `advantages` is as the trainer gave it."""

    rollout_id: str
    group_id: str | None = None
    status: str = "open"
    reward: float | None = None
    step_rewards: Mapping[str, float] = field(default_factory=dict)
    advantages: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
