"""The formats `skyrl` and `skyrl_stepwise`."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import Inexpressible

JOINED = {
    "prompt_token_ids": [[101, 102, 103]],
    "response_ids": [[201, 202, 9, 301, 302, 303, 304, 203, 9]],
    "rewards": [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]],
    "loss_masks": [[1, 1, 1, 0, 0, 0, 0, 1, 1]],
    "stop_reasons": ["stop"],
    "rollout_logprobs": [[-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625]],
    "trajectory_ids": [{"instance_id": "g1", "repetition_id": 0}],
    "is_last_step": None,
    "rollout_metrics": None,
}
STEPWISE = {
    "prompt_token_ids": [[101, 102, 103], [101, 102, 103, 201, 202, 9, 301, 302, 303, 304]],
    "response_ids": [[201, 202, 9], [203, 9]],
    "rewards": [[0.0, 0.0, 0.0], [0.0, 1.0]],
    "loss_masks": [[1, 1, 1], [1, 1]],
    "rollout_logprobs": [[-0.5, -0.25, -0.125], [-1.0, -0.0625]],
    "is_last_step": [False, True],
    "trajectory_ids": [{"instance_id": "g1", "repetition_id": 0}, {"instance_id": "g1", "repetition_id": 0}],
}


def test_a_rollout_is_one_entry_with_its_reward_on_the_last_token():
    assert worked.rows("skyrl") == [JOINED]


def test_a_turn_is_one_entry_and_the_last_is_marked():
    assert worked.gathered("skyrl_stepwise") == STEPWISE


@pytest.mark.parametrize(("name", "entries"), [("skyrl", [0, 1]), ("skyrl_stepwise", [0, 0, 1, 1])])
def test_the_entries_of_a_rollout_are_adjacent_and_have_its_number_in_the_group(name, entries):
    group = worked.gathered(name, worked.FACTS, worked.FACTS)

    assert entries == [trajectory["repetition_id"] for trajectory in group["trajectory_ids"]]
    assert {len(entries)} == {len(value) for value in group.values() if value is not None}


def test_a_step_reward_is_on_the_steps_last_token():
    """At the last step it replaces the rollout's reward."""
    some, all_ = (replace(worked.FACTS, step_rewards=rewards) for rewards in ({"a": 0.5}, {"a": 0.5, "b": 0.25}))

    assert worked.rows("skyrl", facts=some)[0]["rewards"] == [[0, 0, 0.5, 0, 0, 0, 0, 0, 1.0]]
    assert worked.rows("skyrl", facts=all_)[0]["rewards"] == [[0, 0, 0.5, 0, 0, 0, 0, 0, 0.25]]
    assert worked.gathered("skyrl_stepwise", some)["rewards"] == [[0, 0, 0.5], [0, 1.0]]
    assert worked.gathered("skyrl_stepwise", all_)["rewards"] == [[0, 0, 0.5], [0, 0.25]]


def test_token_rewards_are_exported_unchanged():
    """A list of another length than the step's tokens is rejected."""
    valid, wrong = (replace(worked.FACTS, step_rewards={"a": rewards}) for rewards in ([0.1, 0.2, 0.3], [0.1]))

    assert worked.rows("skyrl", facts=valid)[0]["rewards"] == [[0.1, 0.2, 0.3, 0, 0, 0, 0, 0, 1.0]]
    assert worked.gathered("skyrl_stepwise", valid)["rewards"] == [[0.1, 0.2, 0.3], [0, 1.0]]
    with pytest.raises(Inexpressible, match="has 1 rewards for the 3 tokens of step"):
        worked.rows("skyrl", facts=wrong)


def test_a_response_without_a_stop_token_is_rejected_unless_it_was_cut_by_length():
    """It ended with a stop string."""
    stopped = worked.first(worked.sampled(worked.S1, worked.L1, stop_reason="END"))
    cut = worked.first(worked.sampled(worked.S1, worked.L1, finish_reason="length"))
    for name in ("skyrl", "skyrl_stepwise"):
        with pytest.raises(Inexpressible, match="requires a stop token at the end of each response that stopped"):
            worked.rows(name, [stopped])

    assert len(worked.rows("skyrl_stepwise", [cut])) == 1
    assert [row["stop_reasons"] for row in worked.rows("skyrl", [cut])] == [["length"]]


def test_several_sequences_are_exported_by_turn_or_rejected():
    steps = [make_step("a", [1], [10]), make_step("b", [2], [20])]
    with pytest.raises(Inexpressible, match="requires one sequence per rollout; rollout .* has 2 sequences"):
        worked.rows("skyrl", steps)

    assert [row["is_last_step"] for row in worked.rows("skyrl_stepwise", steps)] == [[False], [True]]


@pytest.mark.parametrize("name", ["skyrl", "skyrl_stepwise"])
def test_a_missing_reward_is_rejected(name):
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows(name, facts=replace(worked.FACTS, reward=None))
