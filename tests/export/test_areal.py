"""The format `areal`: AReaL's tensor dict."""

from dataclasses import replace

import pytest
from tests.support import worked

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


def test_arrays_have_shape_1_t_and_the_reward_has_shape_1():
    assert worked.rows("areal") == [EXAMPLE]


def test_a_group_is_a_list_of_dicts():
    """The trainer pads them."""
    assert worked.gathered("areal", worked.FACTS, replace(worked.FACTS, reward=0.0)) == [
        EXAMPLE,
        EXAMPLE | {"rewards": [0.0]},
    ]


def test_each_token_has_its_policy_version():
    """Also if the weights changed within a turn."""
    choice = worked.sampled(worked.S2, worked.L2, spans=(Span(0, 1, "4"), Span(1, 2, "5")))
    (row,) = worked.rows("areal", [worked.first(), worked.second(choice)])

    assert row["versions"][0][-2:] == [4, 5]


def test_a_missing_reward_or_policy_version_is_rejected():
    """AReaL would read them as 0.0 and as a token that was not sampled."""
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows("areal", facts=replace(worked.FACTS, reward=None))
    with pytest.raises(Inexpressible, match="requires a number as policy version; rollout .* has none at step 'a'"):
        worked.rows("areal", [worked.first(policy_version=None)])
