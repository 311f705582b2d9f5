"""The format `osmosis`: token masks, and the masks that the rollout server claimed."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import Inexpressible

EXAMPLE = {
    "rollout_id": "r1",
    "prompt_ids": [101, 102, 103],
    "response_ids": [201, 202, 9, 301, 302, 303, 304, 203, 9],
    "response_mask": [1, 1, 1, 0, 0, 0, 0, 1, 1],
    "logprobs": [-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
    "reward": 1.0,
    "num_turns": 2,
    "mask_claims": [{"call": 0, "claimed": None, "exact": 0}, {"call": 1, "claimed": 4, "exact": 4}],
}


def test_tokens_that_were_not_sampled_have_mask_0_and_logprob_0():
    assert worked.rows("osmosis") == [EXAMPLE]


def test_a_wrong_claim_changes_only_mask_claims():
    (row,) = worked.rows("osmosis", [worked.first(), worked.second(extra={"request_key": "b", "mask_claim": 3})])
    claims = [EXAMPLE["mask_claims"][0], {"call": 1, "claimed": 3, "exact": 4}]

    assert row == EXAMPLE | {"mask_claims": claims}


def test_several_sequences_or_a_missing_reward_are_rejected():
    with pytest.raises(Inexpressible, match="requires one sequence per rollout; rollout .* has 2 sequences"):
        worked.rows("osmosis", [worked.first(), make_step("b", [1], [2])])
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows("osmosis", facts=replace(worked.FACTS, reward=None))
