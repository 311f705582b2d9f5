"""Groups as Atropos' trainer service takes them (`POST /scored_data`, 296a0bc).

A group is one object: the service takes what is posted apart for groups apart. Arrays are unshifted; the trainer drops the
first position itself.
"""

from typing import Any, ClassVar

from proxy.export.base import Batched
from proxy.export.columns import IDS, LOGPROBS, REWARD, Columns
from proxy.export.nodes import NOT_SAMPLED, masked
from proxy.export.views import SequenceView, Source, advantages_of, logprobs_of
from proxy.trajectory.sequence import Row


class ScoredDataFormat(Batched, SequenceView):
    """One ScoredDataGroup of one sequence for each sequence; a group gathers them. Advantages only if some were given."""

    name = "scored_data"
    keeps_first = False
    columns: ClassVar[Columns] = {
        "tokens": [IDS],
        "masks": [IDS],
        "scores": [REWARD],
        "inference_logprobs": [LOGPROBS],
        "advantages": [LOGPROBS],
    }

    def view(self, row: Row, source: Source) -> dict[str, Any]:
        """The object."""
        told = {
            "tokens": [row.token_ids],
            "masks": [masked(row)],
            "scores": [source.reward()],
            "inference_logprobs": [logprobs_of(row, source, NOT_SAMPLED)],
        }
        return told if source.facts.advantages is None else {**told, "advantages": [advantages_of(row, source)]}
