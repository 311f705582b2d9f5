"""The format `trl_async`: RolloutSample of TRL's AsyncGRPO."""

from dataclasses import replace

import pytest
from tests.support import worked

from proxy.export import Inexpressible
from proxy.export.sequence_view import id_number

EXAMPLE = {
    "input_ids": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
    "completion_mask": [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1],
    "old_log_probs": [0.0, 0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
    "advantage": 0.5,
    "model_version": 3,
    "group_id": id_number("g1"),
}


def test_the_model_version_is_the_oldest_and_the_spread_is_a_metric():
    assert worked.rows("trl_async") == [EXAMPLE | {"metrics": {"model_version_spread": 1.0}}]


def test_all_samples_of_a_group_have_its_number():
    """A rollout without a group has a number of its own."""
    ids = {
        name: {
            row["group_id"]
            for row in worked.gathered("trl_async", *(replace(worked.FACTS, **changes) for changes in facts))
        }
        for name, facts in {
            "g1": [{"rollout_id": "r1"}, {"rollout_id": "r2"}],
            "g2": [{"rollout_id": "r3", "group_id": "g2"}],
            "none": [{"rollout_id": "r4", "group_id": None}],
        }.items()
    }

    assert [len(numbers) for numbers in ids.values()] == [1, 1, 1]
    assert len(set.union(*ids.values())) == 3


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"advantages": None}, "requires an advantage"),
        ({"advantages": {"a": 1.0}}, "requires one advantage per rollout"),
    ],
)
def test_a_missing_advantage_or_several_ones_are_rejected(facts, why):
    with pytest.raises(Inexpressible, match=why):
        worked.rows("trl_async", facts=replace(worked.FACTS, **facts))


@pytest.mark.parametrize("version", [None, "step-3", "-1", "²"])
def test_a_policy_version_that_is_no_number_is_rejected(version):
    with pytest.raises(Inexpressible, match="requires a number as policy version; rollout .* at step 'b'"):
        worked.rows("trl_async", [worked.first(), worked.second(policy_version=version)])
