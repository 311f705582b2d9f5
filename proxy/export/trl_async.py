"""Samples of TRL's AsyncGRPO (experimental, trl 1.16.0): whole sequences with one advantage each.

A row has one `model_version`: the oldest that sampled any of it, so that it looks as stale as it is; `metrics` keeps the
spread where there is one. The trainer ends an epoch after as many distinct `group_id`s as there are prompts, and batches
the samples of one `group_id` together: it is derived from the id of the group, and so the same in every claim.
"""

from typing import Any, ClassVar

from proxy.export.base import Listed
from proxy.export.columns import BITS, COUNT, IDS, LOGPROB, LOGPROBS, Columns
from proxy.export.views import SequenceView, Source, advantage_of, logprobs_of, versions_of
from proxy.trajectory.sequence import Row


class TrlAsyncFormat(Listed, SequenceView):
    """One RolloutSample for each sequence."""

    name = "trl_async"
    columns: ClassVar[Columns] = {
        "input_ids": IDS,
        "completion_mask": BITS,
        "old_log_probs": LOGPROBS,
        "advantage": LOGPROB,
        "model_version": COUNT,
        "group_id": COUNT,
        "metrics": {"model_version_spread": LOGPROB},
    }

    def view(self, row: Row, source: Source) -> dict[str, Any]:
        """Return the sample."""
        versions = versions_of(row, source)
        return {
            "input_ids": row.token_ids,
            "completion_mask": row.mask,
            "old_log_probs": logprobs_of(row, source),
            "advantage": advantage_of(source),
            "model_version": versions[0],
            "group_id": source.group_number(),
            "metrics": {"model_version_spread": float(versions[-1] - versions[0])},
        }
