"""The format `slime`: arrays of the response, with the tokens whole."""

from dataclasses import replace

import pytest
import worked
from forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Span

EXAMPLE = {
    "group_index": 0,
    "index": 0,
    "rollout_id": 0,
    "tokens": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
    "response_length": 9,
    "loss_mask": [1, 1, 1, 0, 0, 0, 0, 1, 1],
    "rollout_log_probs": [-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
    "reward": 1.0,
    "status": "completed",
    "weight_versions": ["3", "4"],
}
FORK = [make_step("a", [1], [10]), make_step("b", [2], [20])]


def test_worked_example():
    """The mask and the logprobs begin after the first prompt."""
    assert [EXAMPLE] == worked.rows("slime")


def test_group():
    """Samples are numbered through; sequences of one rollout share its number."""
    form = FORMATS["slime"]
    forked, plain = (form.rows(worked.FACTS, steps, Options()) for steps in (FORK, worked.STEPS))

    assert [(2, 0, 0), (2, 1, 0), (2, 2, 1)] == [
        (row["group_index"], row["index"], row["rollout_id"]) for row in form.gather([forked, plain], 2)
    ]


@pytest.mark.parametrize(
    ("finish_reason", "status", "expected"),
    [
        ("stop", "open", "completed"),
        ("length", "completed", "truncated"),
        ("abort", "open", "aborted"),
        ("stop", "truncated", "truncated"),
        ("stop", "failed", "failed"),
        ("length", "aborted", "aborted"),
    ],
)
def test_status(finish_reason, status, expected):
    """The status is the rollout's where that did not go well, else how its last turn ended."""
    steps = [worked.first(), worked.second(worked.sampled(worked.S2, worked.L2, finish_reason=finish_reason))]

    assert [expected] == [row["status"] for row in worked.rows("slime", steps, replace(worked.FACTS, status=status))]


def test_weight_versions():
    """There is one for each stretch that one version sampled, none if none is known, and no gap."""
    both = worked.sampled(worked.S2, worked.L2, spans=(Span(0, 1, "4"), Span(1, 2, "5")))
    changed = worked.rows("slime", [worked.first(), worked.second(both)])
    unknown = worked.rows("slime", [worked.first(policy_version=None)])
    with pytest.raises(Inexpressible, match="of some of its turns are known, and of others not"):
        worked.rows("slime", [worked.first(policy_version=None), worked.second()])

    assert [["3", "4", "5"], []] == [row["weight_versions"] for row in changed + unknown]
