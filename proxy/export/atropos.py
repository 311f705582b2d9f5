"""Nodes as Atropos' ManagedServer keeps them (296a0bc): aligned tokens, masked tokens and logprobs of a conversation.

A node's text is known only where a tokenizer is at hand (`Fill.decode`); else `full_text` is null, and not made up.
"""

from typing import Any, ClassVar, Final

from proxy.export.base import IDS, LOGPROBS, REWARD, TEXT, Batched, Columns, Listed
from proxy.export.sequence_view import RowSource, SequenceView, advantages_of, logprobs_of
from proxy.trajectory.sequence import Row

IGNORED: Final = -100
NOT_SAMPLED: Final = 1.0  # no legal logprob is above 0


class NodesFormat(Listed, SequenceView):
    """One SequenceNode for each sequence: -100 and 1.0 where nothing is trained."""

    name = "nodes"
    columns: ClassVar[Columns] = {
        "full_text": TEXT,
        "tokens": IDS,
        "masked_tokens": IDS,
        "logprobs": LOGPROBS,
        "metadata": {"finish_reason": TEXT},
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """The node."""
        return {
            "full_text": source.fill.decode(row.token_ids) if source.fill.decode else None,
            "tokens": row.token_ids,
            "masked_tokens": masked(row),
            "logprobs": logprobs_of(row, source, NOT_SAMPLED),
            "metadata": {"finish_reason": row.finish_reason},
        }


def masked(row: Row) -> list[int]:
    """The ids where something is trained, -100 elsewhere."""
    return [token if mask else IGNORED for token, mask in zip(row.token_ids, row.mask, strict=True)]


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

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """The object."""
        told = {
            "tokens": [row.token_ids],
            "masks": [masked(row)],
            "scores": [source.reward()],
            "inference_logprobs": [logprobs_of(row, source, NOT_SAMPLED)],
        }
        return told if source.facts.advantages is None else {**told, "advantages": [advantages_of(row, source)]}
