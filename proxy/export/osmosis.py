"""Rows of Osmosis' remote rollouts (71b6d83), as its trainer builds them: separate prompt and response, and mask claims.

A client claims how many tokens were added before each call (`response_mask`). The mask here is exact; `mask_claims` has
both numbers.
"""

from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, IDS, LOGPROBS, REWARD, TEXT, Columns
from proxy.export.sequence_view import RowSource, SequenceView, filled_logprobs, turns
from proxy.trajectory.sequence import Row


class OsmosisFormat(SequenceView):
    """One row for each rollout. A claim is `mask_claim` in a step's `extra`: the claimed number of tokens."""

    name = "osmosis"
    reward = "required"
    branches = "one"
    columns: ClassVar[Columns] = {
        "rollout_id": TEXT,
        "prompt_ids": IDS,
        "response_ids": IDS,
        "response_mask": BITS,
        "logprobs": LOGPROBS,
        "reward": REWARD,
        "num_turns": COUNT,
        "mask_claims": [{"call": COUNT, "claimed": COUNT, "exact": COUNT}],
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """Return the row; `num_turns` is the number of calls."""
        start = row.prompt_len
        claims = _claims(row, source)
        return {
            "rollout_id": source.facts.rollout_id,
            "prompt_ids": row.token_ids[:start],
            "response_ids": row.token_ids[start:],
            "response_mask": row.mask[start:],
            "logprobs": filled_logprobs(row, source)[start:],
            "reward": source.reward(),
            "num_turns": len(claims),
            "mask_claims": claims,
        }


def _claims(row: Row, source: RowSource) -> list[dict[str, Any]]:
    """Return the number of tokens added by each call since the previous call: as claimed, and as the ids prove."""
    claims: list[dict[str, Any]] = []
    end = row.prompt_len
    for call, turn in enumerate(turns(row)):
        claimed = source.steps[turn.step_id].extra.get("mask_claim")
        claims.append({"call": call, "claimed": claimed, "exact": turn.start - end})
        end = turn.end
    return claims
