"""The format `trl`: the return value of TRL's rollout_func."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options

EXAMPLE = {
    "prompt_ids": [[101, 102, 103]],
    "completion_ids": [[201, 202, 9, 301, 302, 303, 304, 203, 9]],
    "logprobs": [[-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625]],
    "env_mask": [[1, 1, 1, 0, 0, 0, 0, 1, 1]],
    "rollout_id": ["r1"],
    "reward": [1.0],
}
FORK = [make_step("a", [1], [10]), make_step("b", [2, 3], [20])]


def test_the_completion_begins_after_the_first_prompt():
    """Tokens that were not sampled have env_mask 0."""
    assert worked.rows("trl") == [EXAMPLE]


def test_a_group_has_one_entry_per_rollout_in_each_list():
    group = worked.gathered("trl", worked.FACTS, replace(worked.FACTS, reward=0.0))

    assert {key: [*value, *value] for key, value in EXAMPLE.items()} | {"reward": [1.0, 0.0]} == group


def test_a_missing_reward_is_omitted():
    """TRL's reward functions may compute it."""
    assert "reward" not in worked.rows("trl", facts=replace(worked.FACTS, reward=None))[0]


def test_several_sequences_are_rejected_unless_one_is_selected():
    (row,) = worked.rows("trl", FORK, options=Options(branches="last"))
    with pytest.raises(
        Inexpressible,
        match=r"^Format 'trl' requires one sequence per rollout; rollout 'r1' has 2 sequences\. Use threads=main",
    ):
        worked.rows("trl", FORK)

    assert (row["prompt_ids"], row["completion_ids"]) == ([[2, 3]], [[20]])


def test_a_rollout_without_trainable_steps_has_no_row():
    assert (worked.rows("trl", []), FORMATS["trl"].gather([])) == ([], {})
