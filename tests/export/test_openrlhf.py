"""The formats `openrlhf` and `openrlhf_experience`."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import Inexpressible
from proxy.trajectory.sequence import Options


def test_an_agents_response_has_unshifted_tokens_and_one_range_per_turn():
    assert worked.rows("openrlhf") == [
        {
            "observation_tokens": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            "action_ranges": [[3, 6], [10, 12]],
            "rollout_log_probs": [0.0, 0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
            "reward": 1.0,
            "scores": 1.0,
            "truncated": False,
            "rollout_id": "r1",
        }
    ]


def test_the_action_arrays_of_an_experience_begin_at_position_1():
    assert worked.rows("openrlhf_experience") == [
        {
            "sequences": [[101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9]],
            "attention_mask": [[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
            "action_mask": [[0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]],
            "rollout_log_probs": [[0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625]],
            "rewards": [1.0],
            "scores": [1.0],
            "response_length": [9],
            "truncated": [False],
            "total_length": [12.0],
        }
    ]


def test_a_response_cut_by_length_is_truncated_without_an_added_end_of_turn():
    cut = worked.sampled(worked.S2[:1], worked.L2[:1], finish_reason="length")
    (row,) = worked.rows("openrlhf", [worked.first(), worked.second(cut)])

    assert (row["truncated"], row["action_ranges"]) == (True, [[3, 6], [10, 11]])


@pytest.mark.parametrize(("name", "truncated"), [("openrlhf", True), ("openrlhf_experience", [True])])
def test_a_response_cut_by_a_disconnect_is_truncated(name, truncated):
    cut = worked.second(worked.sampled(worked.S2, worked.L2, finish_reason=None), status="partial")
    (row,) = worked.rows(name, [worked.first(), cut], options=Options(include="flagged"))

    assert truncated == row["truncated"]


@pytest.mark.parametrize("name", ["openrlhf", "openrlhf_experience"])
def test_several_sequences_or_a_missing_reward_are_rejected(name):
    with pytest.raises(Inexpressible, match="requires one sequence per rollout; rollout .* has 2 sequences"):
        worked.rows(name, [make_step("a", [1], [10]), make_step("b", [2], [20])])
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows(name, facts=replace(worked.FACTS, reward=None))
