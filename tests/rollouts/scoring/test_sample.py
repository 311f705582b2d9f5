"""Sequences of an audit, parsed from exported rows and from steps."""

from array import array

import pytest
from tests.support.forests import make_choice, make_step

from proxy.rollouts.scoring.sample import of_choice, of_row


def row(**named) -> dict:
    return {
        "rollout_id": "r1",
        "branch": 2,
        "token_ids": [5, 6, 7, 8],
        "mask": [0, 1, 1, 0],
        "logprobs": [None, -0.5, -1, None],
        "spans": [{"start": 1, "end": 3, "step_id": "S1", "temperature": 0.7, "policy_version": "v1"}],
        **named,
    }


def test_a_row_has_its_name_ids_logprobs_and_spans():
    recorded = of_row(row())

    assert ("r1", 2, 0) == (recorded.name, recorded.branch, recorded.mask_offset)
    assert [None, "S1", "S1", None] == [(span := recorded.span_at(index)) and span.step_id for index in range(4)]
    assert (0.7,) == recorded.temperatures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "use rows of"),
        ({"mask": [0, 1]}, "differ in length"),
        ({"token_ids": [5, 6, 7, "8"]}, "token_ids must be non-negative integers"),
        ({"token_ids": [5, 6, 7, True]}, "token_ids must be non-negative integers"),
        ({"logprobs": [None, "x", -1, None]}, "logprobs must be numbers or null"),
        ({"mask": [1, 1, 1, 1]}, "cover different tokens"),
        ({"spans": [{"end": 3}]}, "no valid start"),
    ],
)
def test_an_invalid_row_is_rejected_with_a_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        of_row(row(**changes))
    with pytest.raises(ValueError, match="use rows of"):
        of_row([1])


def test_a_row_without_logprobs_has_mask_offset_0():
    assert 0 == of_row(row(logprobs=[None] * 4)).mask_offset


@pytest.mark.parametrize(
    ("mask", "offset"), [([0, 0, 1, 1], 1), ([1, 1, 0, 0], -1), ([1, 0, 0, 1], 2), ([0, 0, 0, 1], 2)]
)
def test_the_offset_of_a_shifted_mask_is_found(mask, offset):
    """The mask may wrap around or be truncated."""
    assert offset == of_row(row(mask=mask)).mask_offset


def test_logprobs_after_temperature_are_compared_at_temperature_1_only():
    """Raw logprobs are compared at any temperature."""
    spans = [
        {"start": 1, "end": 2, "step_id": "S1", "temperature": 0.7},
        {"start": 2, "end": 3, "step_id": "S2", "temperature": 1.0},
    ]
    recorded = of_row(row(spans=spans))

    assert [None, -0.5, -1, None] == recorded.comparable("raw_logprobs").logprobs
    assert [None, None, -1, None] == recorded.comparable("processed_logprobs").logprobs
    assert [None, None, -1, None] == recorded.comparable("after_temperature_logprobs").logprobs


def test_constrained_tokens_are_not_comparable_in_any_mode():
    spans = [
        {"start": 1, "end": 2, "step_id": "S1", "temperature": 1.0, "constrained": True},
        {"start": 2, "end": 3, "step_id": "S2", "temperature": 1.0, "constrained": False},
    ]
    recorded = of_row(row(spans=spans))

    for mode in ("raw_logprobs", "processed_logprobs", "after_temperature_logprobs"):
        assert [None, None, -1, None] == recorded.comparable(mode).logprobs
        count, why = recorded.skipped(mode)
        assert (1, True) == (count, "with a constraint" in why)
    assert (0, "") == of_row(row()).skipped("raw_logprobs")


def test_a_step_is_a_sequence_of_its_prompt_and_a_choice():
    """The prompt has no logprobs."""
    choice = make_choice(1, (7, 8), logprobs=array("f", [-0.5, -1]))
    recorded = of_choice(make_step("S1", (1, 2, 3), choice), choice)

    assert [1, 2, 3, 7, 8] == recorded.token_ids
    assert [None, None, None, -0.5, -1] == recorded.logprobs
    assert ("S1", 1.0) == (recorded.stretches[0].step_id, recorded.stretches[0].temperature)
