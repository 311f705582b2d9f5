"""slime's Sample (624b824): all tokens, with arrays of the response only.

Sequences of one rollout share its `rollout_id`, over which the trainer sums loss masks (`rollout_mask_sums`).
`rollout_id`, `index` and `group_index` are derived from the ids of the rollout and the group, so they are distinct.
`metadata` has the ID of the rollout and the branch, which the trainer does not read.
`--use-opd` reads `teacher_log_probs` (0d234f3).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, IDS, LOGPROBS, REFERENCES, REWARD, TEXT, Columns
from proxy.export.sequence_view import RowSource, SequenceView, filled_logprobs, id_number, owned_spans, references
from proxy.trajectory.sequence import Role, Row


class SlimeFormat(SequenceView):
    """One sample for each sequence."""

    name = "slime"
    has_images = True
    reward = "required"
    scored: ClassVar[Mapping[Role, Columns]] = {"teacher": {"teacher_log_probs": LOGPROBS}}
    columns: ClassVar[Columns] = {
        "group_index": COUNT,
        "index": COUNT,
        "rollout_id": COUNT,
        "tokens": IDS,
        "response_length": COUNT,
        "loss_mask": BITS,
        "rollout_log_probs": LOGPROBS,
        "reward": REWARD,
        "status": TEXT,
        "weight_versions": [TEXT],
        "metadata": {"rollout_id": TEXT, "branch": COUNT},
        "multimodal_inputs": {"images": REFERENCES},
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        start = row.prompt_len
        return {
            "group_index": source.group_number(),
            "index": id_number(source.facts.rollout_id, str(row.branch)),
            "rollout_id": id_number(source.facts.rollout_id),
            "tokens": row.token_ids,
            "response_length": len(row.token_ids) - start,
            "loss_mask": row.mask[start:],
            "rollout_log_probs": filled_logprobs(row, source)[start:],
            "reward": source.reward(),
            "status": _status(row, source),
            "weight_versions": _versions(row, source),
            "metadata": {"rollout_id": source.facts.rollout_id, "branch": row.branch},
            **({"multimodal_inputs": {"images": images}} if (images := references(row, source)) else {}),
        }

    def placed(self, logprobs: list[float], row: Row) -> list[Any]:
        return logprobs[row.prompt_len :]


def _status(row: Row, source: RowSource) -> str:
    if source.facts.status in {"failed", "aborted"}:
        return source.facts.status
    if row.finish_reason == "abort":
        return "aborted"
    return "truncated" if row.truncated or source.facts.status == "truncated" else "completed"


def _versions(row: Row, source: RowSource) -> list[str]:
    spans = owned_spans(row)
    known = [span.policy_version for span in spans if span.policy_version is not None]
    if known and len(known) < len(spans):
        raise source.refuse("the policy version of every turn, or of none", "it for some turns only")
    return known
