"""OpenRLHF 0.11.2's two inputs: the response of an agent, and the Experience that is made from it.

The agent's response is not shifted. The action arrays of an Experience start at position 1: position i is token i + 1.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, FLAG, IDS, LOGPROB, LOGPROBS, REFERENCES, REWARD, TEXT, Columns
from proxy.export.sequence_view import RowSource, SequenceView, filled_logprobs, owned_turns, references
from proxy.trajectory.sequence import Role, Row


class OpenRlhfFormat(SequenceView):
    """One agent response for each rollout; `action_ranges` has one half-open range for each turn.

    The trainer does not read `rollout_id`.
    """

    name = "openrlhf"
    has_images = True
    reward = "required"
    branches = "one"
    columns: ClassVar[Columns] = {
        "observation_tokens": IDS,
        "action_ranges": [[COUNT]],
        "rollout_log_probs": LOGPROBS,
        "reward": REWARD,
        "scores": REWARD,
        "truncated": FLAG,
        "rollout_id": TEXT,
        "images": REFERENCES,
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        return {
            "observation_tokens": row.token_ids,
            "action_ranges": [[turn.start, turn.end] for turn in owned_turns(row)],
            "rollout_log_probs": filled_logprobs(row, source),
            "reward": source.reward(),
            "scores": source.reward(),
            "truncated": row.truncated,
            "rollout_id": source.facts.rollout_id,
            **({"images": images} if (images := references(row, source)) else {}),
        }


class OpenRlhfExperienceFormat(SequenceView):
    """One Experience of one row for each rollout, unpadded."""

    name = "openrlhf_experience"
    reward = "required"
    branches = "one"
    keeps_first = False
    scored: ClassVar[Mapping[Role, Columns]] = {
        "proximal": {"action_log_probs": [LOGPROBS]},
        "teacher": {"base_action_log_probs": [LOGPROBS]},
    }
    columns: ClassVar[Columns] = {
        "sequences": [IDS],
        "attention_mask": [BITS],
        "action_mask": [BITS],
        "rollout_log_probs": [LOGPROBS],
        "rewards": [REWARD],
        "scores": [REWARD],
        "response_length": [COUNT],
        "truncated": [FLAG],
        "total_length": [LOGPROB],
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """Return the experience.

        `response_length` is from the first sampled token to the last, with tool outputs between them.
        """
        sampled = owned_turns(row)
        return {
            "sequences": [row.token_ids],
            "attention_mask": [[1] * len(row.token_ids)],
            "action_mask": [row.mask[1:]],
            "rollout_log_probs": [filled_logprobs(row, source)[1:]],
            "rewards": [source.reward()],
            "scores": [source.reward()],
            "response_length": [sampled[-1].end - sampled[0].start],
            "truncated": [row.truncated],
            "total_length": [float(len(row.token_ids))],
        }

    def placed(self, logprobs: list[float], row: Row) -> list[Any]:
        return [logprobs[1:]]
