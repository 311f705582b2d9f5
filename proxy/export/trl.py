"""What a TRL `rollout_func` returns to the GRPOTrainer (trl 1.16.0): lists by key, one entry for each rollout.

The trainer reads the last completion id: one that is no EOS says "truncated". It is the sampled one, as it came.
"""

from typing import Any, ClassVar

from proxy.export.base import Batched
from proxy.export.columns import BITS, IDS, LOGPROBS, REWARD, Columns
from proxy.export.views import SequenceView, Source, logprobs_of
from proxy.trajectory.sequence import Row


class TrlFormat(Batched, SequenceView):
    """Prompt and completion apart; `reward` goes to the reward functions, and is absent if there is none."""

    name = "trl"
    single = True
    columns: ClassVar[Columns] = {
        "prompt_ids": [IDS],
        "completion_ids": [IDS],
        "logprobs": [LOGPROBS],
        "env_mask": [BITS],
        "reward": [REWARD],
    }

    def view(self, row: Row, source: Source) -> dict[str, Any]:
        """The object, with one entry in each list."""
        start = row.prompt_len
        told = {
            "prompt_ids": [row.token_ids[:start]],
            "completion_ids": [row.token_ids[start:]],
            "logprobs": [logprobs_of(row, source)[start:]],
            "env_mask": [row.mask[start:]],
        }
        return told if source.facts.reward is None else {**told, "reward": [source.reward()]}
