"""The result of a TRL `rollout_func` for the GRPOTrainer (trl 1.16.0): lists by key, one entry for each rollout.

The trainer treats a completion as truncated if its last id, as sampled, is not an EOS.
"""

from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, IDS, LOGPROB, LOGPROBS, REFERENCES, REWARD, TEXT, Batched, Columns
from proxy.export.sequence_view import (
    RowSource,
    SequenceView,
    advantage_from,
    filled_logprobs,
    policy_versions_from,
    references,
)
from proxy.trajectory.sequence import Row


class TrlFormat(Batched, SequenceView):
    """Separate prompt and completion. `reward` and `rollout_id` are for the reward functions.

    `reward` is absent if there is none. `images` is in all rows of a group if one has images.
    """

    name = "trl"
    has_images = True
    reward = "uniform"
    branches = "one"
    columns: ClassVar[Columns] = {
        "prompt_ids": [IDS],
        "completion_ids": [IDS],
        "logprobs": [LOGPROBS],
        "env_mask": [BITS],
        "rollout_id": [TEXT],
        "reward": [REWARD],
        "images": [REFERENCES],
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        start = row.prompt_len
        fields = {
            "prompt_ids": [row.token_ids[:start]],
            "completion_ids": [row.token_ids[start:]],
            "logprobs": [filled_logprobs(row, source)[start:]],
            "env_mask": [row.mask[start:]],
            "rollout_id": [source.facts.rollout_id],
        }
        fields |= {} if source.facts.reward is None else {"reward": [source.reward()]}
        return {**fields, "images": [images]} if (images := references(row, source)) else fields


class TrlAsyncFormat(SequenceView):
    """One RolloutSample for each sequence."""

    name = "trl_async"
    reward_place = "none"
    advantage_place = "rollout"
    columns: ClassVar[Columns] = {
        "input_ids": IDS,
        "completion_mask": BITS,
        "old_log_probs": LOGPROBS,
        "advantage": LOGPROB,
        "model_version": COUNT,
        "group_id": COUNT,
        "metrics": {"model_version_spread": LOGPROB},
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        versions = policy_versions_from(row, source)
        return {
            "input_ids": row.token_ids,
            "completion_mask": row.mask,
            "old_log_probs": filled_logprobs(row, source),
            "advantage": advantage_from(source),
            "model_version": versions[0],
            "group_id": source.group_number(),
            "metrics": {"model_version_spread": float(versions[-1] - versions[0])},
        }
