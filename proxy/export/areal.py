"""AReaL's tensor dict of an interaction (areal 1.0.4, `to_tensor_dict`), as lists of one sequence.

AReaL counts a missing reward as 0.0, so this format requires a reward. Scores are shifted as `compute_logp` returns them:
position i describes token i + 1.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from proxy.export.base import BITS, COUNT, FLAG, IDS, LOGPROBS, REWARD, Columns
from proxy.export.sequence_view import RowSource, SequenceView, filled_logprobs, owned_spans
from proxy.trajectory.sequence import Role, Row

NOT_SAMPLED: Final = -1


class ArealFormat(SequenceView):
    """One dict for each sequence. All values have shape [1, T] except `rewards`; the trainer pads."""

    name = "areal"
    reward = "required"
    scored: ClassVar[Mapping[Role, Columns]] = {
        "proximal": {"prox_logp": [LOGPROBS]},
        "teacher": {"teacher_logp": [LOGPROBS]},
    }
    columns: ClassVar[Columns] = {
        "input_ids": [IDS],
        "loss_mask": [BITS],
        "logprobs": [LOGPROBS],
        "versions": [[COUNT]],
        "attention_mask": [[FLAG]],
        "rewards": [REWARD],
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """Return the dict. `versions` is the policy version of each token that is trained here, -1 elsewhere."""
        versions = [NOT_SAMPLED] * len(row.token_ids)
        for span in owned_spans(row):
            number = source.version(span.step_id, span.policy_version)
            versions[span.start : span.end] = [number] * (span.end - span.start)
        return {
            "input_ids": [row.token_ids],
            "loss_mask": [row.mask],
            "logprobs": [filled_logprobs(row, source)],
            "versions": [versions],
            "attention_mask": [[True] * len(row.token_ids)],
            "rewards": [source.reward()],
        }

    def placed(self, logprobs: list[float], row: Row) -> list[Any]:
        return [[*logprobs[1:], 0.0]]
