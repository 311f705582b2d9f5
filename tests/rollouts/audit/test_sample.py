"""Sequences, read off exported rows and off steps."""

from array import array

import pytest
from forests import make_choice, make_step

from proxy.rollouts.audit.sample import of_choice, of_row


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


def test_a_row_is_read_as_it_is():
    """Names, ids, logprobs, and what each stretch was sampled with."""
    recorded = of_row(row())

    assert ("r1", 2, 0) == (recorded.name, recorded.branch, recorded.mask_offset)
    assert [None, "S1", "S1", None] == [(span := recorded.span_at(index)) and span.step_id for index in range(4)]
    assert (0.7,) == recorded.temperatures


@pytest.mark.parametrize(
    ("changes", "told"),
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
def test_what_is_no_row_is_told(changes, told):
    """Nothing is filled in or cut to fit."""
    with pytest.raises(ValueError, match=told):
        of_row(row(**changes))
    with pytest.raises(ValueError, match="use rows of"):
        of_row([1])


def test_a_row_without_any_logprob_has_nothing_to_compare():
    """Nobody asked for them, so nothing stands in a wrong place."""
    assert 0 == of_row(row(logprobs=[None] * 4)).mask_offset


@pytest.mark.parametrize(
    ("mask", "offset"), [([0, 0, 1, 1], 1), ([1, 1, 0, 0], -1), ([1, 0, 0, 1], 2), ([0, 0, 0, 1], 2)]
)
def test_a_moved_mask_is_seen(mask, offset):
    """Whether what goes over the end is lost or comes in again."""
    assert offset == of_row(row(mask=mask)).mask_offset


def test_logprobs_after_temperature_are_compared_at_temperature_1_only():
    """They cannot be scored again; raw ones can at any."""
    spans = [
        {"start": 1, "end": 2, "step_id": "S1", "temperature": 0.7},
        {"start": 2, "end": 3, "step_id": "S2", "temperature": 1.0},
    ]
    recorded = of_row(row(spans=spans))

    assert [None, -0.5, -1, None] == recorded.comparable("raw_logprobs").logprobs
    assert [None, None, -1, None] == recorded.comparable("processed_logprobs").logprobs
    assert [None, None, -1, None] == recorded.comparable("after_temperature_logprobs").logprobs


def test_what_was_constrained_is_not_compared_in_any_mode():
    """No engine scores it again, at any temperature."""
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
    """The prompt has nothing to compare."""
    choice = make_choice(1, (7, 8), logprobs=array("f", [-0.5, -1]))
    recorded = of_choice(make_step("S1", (1, 2, 3), choice), choice)

    assert [1, 2, 3, 7, 8] == recorded.token_ids
    assert [None, None, None, -0.5, -1] == recorded.logprobs
    assert ("S1", 1.0) == (recorded.stretches[0].step_id, recorded.stretches[0].temperature)
