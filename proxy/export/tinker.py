"""Tinker's Datum (tinker 0.38.0), which is shifted by one: position i predicts token i + 1."""

from typing import Any, ClassVar

from proxy.export.base import IDS, LOGPROBS, Columns
from proxy.export.sequence_view import RowSource, SequenceView, advantages_from, filled_logprobs
from proxy.trajectory.sequence import Row


class TinkerFormat(SequenceView):
    """One Datum for each sequence, as plain lists."""

    name = "tinker"
    reward_place = "none"
    advantage_place = "token"
    keeps_first = False
    columns: ClassVar[Columns] = {
        "model_input": IDS,
        "target_tokens": IDS,
        "logprobs": LOGPROBS,
        "advantages": LOGPROBS,
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        return {
            "model_input": row.token_ids[:-1],
            "target_tokens": row.token_ids[1:],
            "logprobs": filled_logprobs(row, source)[1:],
            "advantages": advantages_from(row, source)[1:],
        }
