"""The format `trl`: what a rollout_func returns."""

from dataclasses import replace

import pytest
import worked
from forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options

EXAMPLE = {
    "prompt_ids": [[101, 102, 103]],
    "completion_ids": [[201, 202, 9, 301, 302, 303, 304, 203, 9]],
    "logprobs": [[-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625]],
    "env_mask": [[1, 1, 1, 0, 0, 0, 0, 1, 1]],
    "reward": [1.0],
}
FORK = [make_step("a", [1], [10]), make_step("b", [2, 3], [20])]


def test_worked_example():
    """The completion begins after the first prompt; what came from outside has env_mask 0."""
    assert [EXAMPLE] == worked.rows("trl")


def test_group():
    """A group has one entry in each list for each rollout, in order."""
    group = worked.gathered("trl", worked.FACTS, replace(worked.FACTS, reward=0.0))

    assert {key: [*value, *value] for key, value in EXAMPLE.items()} | {"reward": [1.0, 0.0]} == group


def test_no_reward():
    """Reward functions may give the reward later: without one there is no such key."""
    assert "reward" not in worked.rows("trl", facts=replace(worked.FACTS, reward=None))[0]


def test_fork():
    """A rollout of several sequences is refused, unless one of them is asked for."""
    (row,) = worked.rows("trl", FORK, options=Options(branches="last"))
    with pytest.raises(
        Inexpressible,
        match=r"^Format 'trl' requires one sequence per rollout; rollout 'r1' has 2 sequences\. Use branches=longest",
    ):
        worked.rows("trl", FORK)

    assert ([[2, 3]], [[20]]) == (row["prompt_ids"], row["completion_ids"])


def test_nothing():
    """A rollout that nothing may be trained of has no row, and a group of none is no rows."""
    assert ([], {}) == (worked.rows("trl", []), FORMATS["trl"].gather([]))
