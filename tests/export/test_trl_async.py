"""The format `trl_async`: RolloutSamples of TRL's AsyncGRPO."""

from dataclasses import replace

import pytest
import worked

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options

EXAMPLE = {
    "input_ids": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
    "completion_mask": [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1],
    "old_log_probs": [0.0, 0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
    "advantage": 0.5,
    "model_version": 3,
    "group_id": 0,
}


def test_worked_example():
    """The version is the oldest that sampled anything; the spread is in the metrics."""
    assert [EXAMPLE | {"metrics": {"model_version_spread": 1.0}}] == worked.rows("trl_async")


def test_group():
    """Gathered samples carry the number of their group."""
    form = FORMATS["trl_async"]
    member = form.rows(worked.FACTS, worked.STEPS, Options())

    assert [7, 7] == [row["group_id"] for row in form.gather([member, member], 7)]
    assert [0] == [row["group_id"] for row in member.rows]


@pytest.mark.parametrize(
    ("facts", "why"),
    [({"advantages": None}, "it has no advantage"), ({"advantages": {"a": 1.0}}, "it has several advantages")],
)
def test_advantage(facts, why):
    """One advantage is wanted, and none is made up."""
    with pytest.raises(Inexpressible, match=why):
        worked.rows("trl_async", facts=replace(worked.FACTS, **facts))


@pytest.mark.parametrize("version", [None, "step-3", "-1", "²"])
def test_version(version):
    """A version that is no number is refused."""
    with pytest.raises(Inexpressible, match="the policy version of step 'b' is"):
        worked.rows("trl_async", [worked.first(), worked.second(policy_version=version)])
