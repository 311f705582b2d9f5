"""The format `training_examples`: verifiers' TrainingExample."""

from dataclasses import replace

import pytest
import worked
from forests import make_step

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


def test_worked_example():
    """Each step is an example of its own: its prompt, and what was sampled after it."""
    assert EXAMPLES == worked.rows("training_examples")


def test_reward():
    """A step that was given a reward has its own; of two, the other has the rollout's, which is never null."""
    rows = worked.rows("training_examples", facts=replace(worked.FACTS, step_rewards={"a": 0.25}))
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows("training_examples", facts=replace(worked.FACTS, reward=None))

    assert [0.25, 1.0] == [row["reward"] for row in rows]


def test_max_len():
    """What was sampled is cut to `max_len`; where nothing of it is left, there is no example, and it is told."""
    cut = worked.rows("training_examples", options=Options(max_len=11))
    found = FORMATS["training_examples"].rows(worked.FACTS, worked.STEPS, Options(max_len=10))

    assert ([203], [0] * 10 + [1]) == (cut[1]["token_ids"][10:], cut[1]["mask"])
    assert (EXAMPLES[:1], [{"step_id": "b", "why": "longer than max_len=10"}]) == (found.rows, found.skipped)


def test_branches():
    """A rollout of any shape has its examples, and a retry that was replaced has none."""
    lost = make_step("a", [1], [10], delivered=False, extra={"request_key": "x"})
    again = make_step("b", [1], [10], extra={"request_key": "x"})

    assert [[1, 10], [5, 6]] == [
        row["token_ids"] for row in worked.rows("training_examples", [lost, again, make_step("c", [5], [6])])
    ]
