"""Atropos' formats (296a0bc): the nodes of its ManagedServer, and ScoredDataGroups.

The text of a node requires a tokenizer (`Fill.decode`); without one, `full_text` is null.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from proxy.export.base import IDS, LOGPROBS, REFERENCES, REWARD, TEXT, Batched, Columns
from proxy.export.sequence_view import (
    RowSource,
    SequenceView,
    advantages_from,
    filled_likely,
    filled_logprobs,
    references,
)
from proxy.trajectory.sequence import Role, Row, Scores

IGNORED: Final = -100
NOT_SAMPLED: Final = 1.0  # valid logprobs are at most 0


class NodesFormat(SequenceView):
    """One SequenceNode for each sequence: -100 and 1.0 where nothing is trained."""

    name = "nodes"
    reward_place = "none"
    columns: ClassVar[Columns] = {
        "full_text": TEXT,
        "tokens": IDS,
        "masked_tokens": IDS,
        "logprobs": LOGPROBS,
        "metadata": {"finish_reason": TEXT},
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        return {
            "full_text": source.fill.decode(row.token_ids) if source.fill.decode else None,
            "tokens": row.token_ids,
            "masked_tokens": masked(row),
            "logprobs": filled_logprobs(row, source, NOT_SAMPLED),
            "metadata": {"finish_reason": row.finish_reason},
        }


def masked(row: Row) -> list[int]:
    """Return the ids where something is trained, -100 elsewhere."""
    return [token if mask else IGNORED for token, mask in zip(row.token_ids, row.mask, strict=True)]


class ScoredDataFormat(Batched, SequenceView):
    """One ScoredDataGroup of one sequence for each sequence; groups combine them.

    Advantages are included if there are any.
    """

    name = "scored_data"
    has_images = True
    advantage_place = "token"
    reward = "required"
    keeps_first = False
    scored: ClassVar[Mapping[Role, Columns]] = {"teacher": {"ref_logprobs": [LOGPROBS]}}
    likely: ClassVar[Mapping[Role, Columns]] = {
        "teacher": {"distill_token_ids": [[IDS]], "distill_logprobs": [[LOGPROBS]]}
    }
    columns: ClassVar[Columns] = {
        "tokens": [IDS],
        "masks": [IDS],
        "scores": [REWARD],
        "inference_logprobs": [LOGPROBS],
        "advantages": [LOGPROBS],
        "images": [REFERENCES],
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        fields = {
            "tokens": [row.token_ids],
            "masks": [masked(row)],
            "scores": [source.reward()],
            "inference_logprobs": [filled_logprobs(row, source, NOT_SAMPLED)],
        }
        fields |= {} if source.facts.advantages is None else {"advantages": [advantages_from(row, source)]}
        return {**fields, "images": [images]} if (images := references(row, source)) else fields

    def with_scores(self, view: dict[str, Any], row: Row, source: RowSource, scores: Scores) -> dict[str, Any]:
        fields = {**view, "ref_logprobs": [scores.filled(row.mask, NOT_SAMPLED)]}
        if not scores.top_k:
            return fields
        ids, logprobs = filled_likely(row, scores)
        return {**fields, "distill_token_ids": [ids], "distill_logprobs": [logprobs]}
