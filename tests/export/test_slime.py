"""The format `slime`: arrays of the response, and the tokens of prompt and response."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.export.sequence_view import id_number
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Span

EXAMPLE = {
    "group_index": id_number("g1"),
    "index": id_number("r1", "0"),
    "rollout_id": id_number("r1"),
    "tokens": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
    "response_length": 9,
    "loss_mask": [1, 1, 1, 0, 0, 0, 0, 1, 1],
    "rollout_log_probs": [-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
    "reward": 1.0,
    "status": "completed",
    "weight_versions": ["3", "4"],
    "metadata": {"rollout_id": "r1", "branch": 0},
}
FORK = [make_step("a", [1], [10]), make_step("b", [2], [20])]


def test_mask_and_logprobs_begin_after_the_first_prompt():
    assert worked.rows("slime") == [EXAMPLE]


def gather_group(group_id, members):
    """Return the samples of a group; `members` maps rollout ids to steps."""
    form = FORMATS["slime"]
    facts = {name: replace(worked.FACTS, rollout_id=name, group_id=group_id) for name in members}
    return form.gather([form.rows(facts[name], steps, Options()) for name, steps in members.items()])


def mask_sums(samples):
    """Return the denominators of slime's loss (624b824): the sum of the loss masks of a rollout's samples, per sample."""
    sums = Counter()
    for sample in samples:
        sums[sample["rollout_id"]] += sum(sample["loss_mask"])
    return [sums[sample["rollout_id"]] for sample in samples]


def test_each_rollout_has_its_own_loss_denominator_and_each_sample_its_own_index():
    """Over several groups."""
    r1, r2, r3, r4 = ([worked.first(worked.sampled([201] * n, [-0.5] * n))] for n in (55, 35, 65, 56))
    samples = gather_group("g1", {"r1": r1, "r2": r2, "r5": FORK}) + gather_group("g2", {"r3": r3, "r4": r4})

    assert mask_sums(samples) == [55, 35, 2, 2, 65, 56]
    assert len({sample["index"] for sample in samples}) == 6
    assert list(Counter(sample["group_index"] for sample in samples).values()) == [4, 2]


def test_a_rollout_has_the_same_numbers_alone_and_in_its_group():
    (alone,) = worked.rows("slime")
    (_, gathered) = gather_group("g1", {"r2": worked.STEPS, "r1": worked.STEPS})

    assert gathered == alone


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
def test_the_status_is_the_rollouts_unless_it_completed(finish_reason, status, expected):
    """Otherwise it follows the last finish reason."""
    steps = [worked.first(), worked.second(worked.sampled(worked.S2, worked.L2, finish_reason=finish_reason))]

    assert [row["status"] for row in worked.rows("slime", steps, replace(worked.FACTS, status=status))] == [expected]


def test_a_sample_with_an_interrupted_last_turn_is_truncated():
    broken = worked.second(worked.sampled(worked.S2, worked.L2, finish_reason=None), status="partial")
    rows = worked.rows("slime", [worked.first(), broken], options=Options(include="flagged"))

    assert [row["status"] for row in rows] == ["truncated"]


def test_weight_versions_lists_each_policy_version_span():
    """The list is empty if no version is known; if only some are known, the rollout is rejected."""
    both = worked.sampled(worked.S2, worked.L2, spans=(Span(0, 1, "4"), Span(1, 2, "5")))
    changed = worked.rows("slime", [worked.first(), worked.second(both)])
    unknown = worked.rows("slime", [worked.first(policy_version=None)])
    with pytest.raises(
        Inexpressible,
        match="requires the policy version of every turn, or of none; rollout .* has it for some turns only",
    ):
        worked.rows("slime", [worked.first(policy_version=None), worked.second()])

    assert [row["weight_versions"] for row in changed + unknown] == [["3", "4", "5"], []]
