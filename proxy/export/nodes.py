"""Nodes as Atropos' ManagedServer keeps them (296a0bc): aligned tokens, masked tokens and logprobs of a conversation.

A node's text is known only where a tokenizer is at hand (`Fill.decode`); else `full_text` is null, and not made up.
"""

from typing import Any, ClassVar, Final

from proxy.export.base import Listed
from proxy.export.columns import IDS, LOGPROBS, TEXT, Columns
from proxy.export.views import SequenceView, Source, logprobs_of
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

    def view(self, row: Row, source: Source) -> dict[str, Any]:
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
