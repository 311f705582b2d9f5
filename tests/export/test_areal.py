"""The format `areal`: AReaL's tensor dict."""

from dataclasses import replace

import pytest
import worked

from proxy.export import Inexpressible
from proxy.trajectory.step import Span

EXAMPLE = {
    "input_ids": [[101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9]],
    "loss_mask": [[0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]],
    "logprobs": [[0.0, 0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625]],
    "versions": [[-1, -1, -1, 3, 3, 3, -1, -1, -1, -1, 4, 4]],
    "attention_mask": [[True, True, True, True, True, True, True, True, True, True, True, True]],
    "rewards": [1.0],
}


def test_worked_example():
    """Everything is shaped [1, T], the reward [1]."""
    assert [EXAMPLE] == worked.rows("areal")


def test_group():
    """A group is the list of its dicts: the trainer pads."""
    assert [EXAMPLE, EXAMPLE | {"rewards": [0.0]}] == worked.gathered(
        "areal", worked.FACTS, replace(worked.FACTS, reward=0.0)
    )


def test_versions():
    """Where the weights changed while a turn was sampled, each token has its own version."""
    choice = worked.sampled(worked.S2, worked.L2, spans=(Span(0, 1, "4"), Span(1, 2, "5")))
    (row,) = worked.rows("areal", [worked.first(), worked.second(choice)])

    assert [4, 5] == row["versions"][0][-2:]


def test_refused():
    """A missing reward would count as 0.0, and a missing version as a token that nobody sampled: both are refused."""
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows("areal", facts=replace(worked.FACTS, reward=None))
    with pytest.raises(Inexpressible, match="requires a number as policy version; rollout .* has None at step 'a'"):
        worked.rows("areal", [worked.first(policy_version=None)])
