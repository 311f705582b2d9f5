"""The canonical rows: every other format is a view of these."""

from collections.abc import Sequence

from proxy.export.base import Rows, skipped_rows
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import Options, sequences
from proxy.trajectory.step import Step


class SequencesFormat:
    """One row per branch of the rollout."""

    name = "sequences"

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options) -> Rows:
        """The canonical rows, the oldest leaf's first."""
        found = sequences(steps, facts, options)
        return Rows([row.as_row() for row in found.rows], skipped_rows(found.skipped))
