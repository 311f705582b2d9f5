"""The format `training_examples`: verifiers' TrainingExample."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options

EXAMPLES = [
    {
        "token_ids": [101, 102, 103, 201, 202, 9],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, -0.125],
        "mask": [0, 0, 0, 1, 1, 1],
        "reward": 1.0,
    },
    {
        "token_ids": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
        "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
        "mask": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
        "reward": 1.0,
    },
]


def test_each_step_is_an_example_with_its_prompt_and_completion():
    assert EXAMPLES == worked.rows("training_examples")


def test_a_step_reward_overrides_the_rollouts_reward():
    """The reward is never null."""
    rows = worked.rows("training_examples", facts=replace(worked.FACTS, step_rewards={"a": 0.25}))
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows("training_examples", facts=replace(worked.FACTS, reward=None))

    assert [0.25, 1.0] == [row["reward"] for row in rows]


def test_the_completion_is_cut_to_max_len():
    """A step without a completion is skipped and reported."""
    cut = worked.rows("training_examples", options=Options(max_len=11))
    found = FORMATS["training_examples"].rows(worked.FACTS, worked.STEPS, Options(max_len=10))

    assert ([203], [0] * 10 + [1]) == (cut[1]["token_ids"][10:], cut[1]["mask"])
    skipped = [{"step_id": "b", "why": "longer than max_len=10", "dropped_tokens": 2}]
    assert (EXAMPLES[:1], skipped) == (found.rows, found.skipped)


def test_a_superseded_call_has_no_example():
    lost = make_step("a", [1], [10], delivered=False, extra={"request_key": "x"})
    again = make_step("b", [1], [10], extra={"request_key": "x"})

    assert [[1, 10], [5, 6]] == [
        row["token_ids"] for row in worked.rows("training_examples", [lost, again, make_step("c", [5], [6])])
    ]
