"""Verdicts on recorded logprobs, with a model that is a function of the prefix."""

import math
import random
from array import array
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step

from proxy.rollouts.scoring.verdict import (
    OFFSETS,
    ChanceModel,
    Pair,
    go_together,
    judge,
    line_through,
    may_be_moved,
    moved_ids,
    nearly_all_agree,
    no_chance,
    of_choice,
    of_row,
)
from proxy.simulator.sampler import mix, prefix_from

TOLERANCE = 0.01
PROMPT, TURNS = 12, ((12, 60), (70, 110))
LENGTH = 112
seeds = st.integers(0, 10_000)
# The same examples in each run: a verdict is a statistical statement, and about one in ten thousand rows has another one.
fixed = settings(derandomize=True)


def chance(prefix, weights) -> float:
    """Return the probability of a prefix's last token; half of the tokens are nearly certain, as with good models."""
    bits = mix(prefix.hash ^ mix(weights))
    return 0.9999 if bits & 1 else (bits >> 11) / 2**53 * 0.98 + 0.01


def scores(ids, weights=0) -> list[float | None]:
    prefixes = list(accumulate(ids[1:], lambda prefix, token: prefix.with_token(token), initial=prefix_from(ids[:1])))
    return [None, *(math.log(chance(prefix, weights)) for prefix in prefixes[1:])]


def honest(seed: int, weights=0, temperature=1.0) -> dict:
    """Return a row of two sampled turns."""
    draw = random.Random(seed)
    ids = [draw.randrange(4096) for _ in range(LENGTH)]
    mask = [int(any(start <= index < end for start, end in TURNS)) for index in range(LENGTH)]
    values = scores(ids, weights)
    spans = [
        {"start": start, "end": end, "step_id": f"S{n}", "policy_version": "v1", "temperature": temperature}
        for n, (start, end) in enumerate(TURNS)
    ]
    logprobs = [value if trained else None for value, trained in zip(values, mask, strict=True)]
    return {
        "rollout_id": "r",
        "branch": 0,
        "token_ids": ids,
        "mask": mask,
        "logprobs": logprobs,
        "spans": spans,
    }


def audited(row: dict, *, scoring=scores, moving=True):
    """Return the assessment as the audit computes it: shifted ids are scored only if that can be informative."""
    recorded = of_row(row)
    scored = scoring(recorded.token_ids)
    assessment = judge(recorded, scored, TOLERANCE)
    if moving and may_be_moved(assessment, recorded, scored):
        moved = {offset: scoring(moved_ids(recorded.token_ids, offset)) for offset in OFFSETS}
        assessment = judge(recorded, scored, TOLERANCE, moved)
    return assessment


def rolled(values: list, by: int) -> list:
    return values[-by:] + values[:-by]


@fixed
@given(seeds, st.floats(0, 0.009))
def test_honest_rows_are_aligned(seed, noise):
    """The engine's arithmetic may differ by less than the tolerance."""
    row = honest(seed)
    assessment = audited(row, scoring=lambda ids: [v and v - noise for v in scores(ids)])

    assert (assessment.verdict, assessment.count, assessment.first) == ("aligned", 88, None)
    assert assessment.max <= 0.01


@fixed
@given(seeds, st.sampled_from(OFFSETS))
def test_ids_shifted_against_mask_and_logprobs_are_found(seed, by):
    row = honest(seed)
    row["token_ids"] = rolled(row["token_ids"], by)
    assessment = audited(row)

    assert (assessment.verdict, assessment.offset) == ("shifted", -by)
    assert "ids are" in assessment.note


@fixed
@given(seeds, st.sampled_from(OFFSETS))
def test_mask_and_logprobs_shifted_against_ids_are_found(seed, by):
    row = honest(seed)
    row |= {"mask": rolled(row["mask"], by), "logprobs": rolled(row["logprobs"], by)}
    assessment = audited(row)

    assert (assessment.verdict, assessment.offset) == ("shifted", by)
    assert "mask and logprobs are" in assessment.note


@fixed
@given(seeds, st.sampled_from(OFFSETS), st.booleans())
def test_a_shifted_mask_is_found(seed, by, lost):
    """It may be truncated at the end or wrap around."""
    row = honest(seed)
    mask = rolled(row["mask"], by)
    if lost:
        mask[slice(by) if by > 0 else slice(by, None)] = [0] * abs(by)
    assessment = audited(row | {"mask": mask})

    assert (assessment.verdict, assessment.offset) == ("shifted", by)
    assert "the mask is" in assessment.note


@fixed
@given(seeds, st.integers(30, LENGTH - 4))
def test_a_replaced_token_is_located(seed, index):
    """The first difference is at the token, or at the first later sampled token with another score."""
    row = honest(seed)
    row["token_ids"][index] += 1
    assessment = audited(row)
    if assessment.verdict in ("aligned", "other weights"):  # too few sampled tokens may follow to locate a difference
        assert index >= 100
        return

    assert assessment.verdict == "wrong tokens"
    assert index <= assessment.first
    trained = [later for later in range(index, assessment.first) if row["mask"][later]]
    assert all(abs(scores(row["token_ids"])[later] - row["logprobs"][later]) <= TOLERANCE for later in trained)


def test_a_wrong_id_that_was_not_sampled_is_located_as_a_range():
    """It is in a tool result between two turns."""
    row = honest(3)
    row["token_ids"][64] += 1
    assessment = audited(row)

    assert assessment.verdict == "wrong tokens"
    assert 70 <= assessment.first <= 73
    assert f"one of 60 to {assessment.first}" in assessment.note


def test_a_wrong_last_token_is_found():
    """No later token has another score."""
    row = honest(5)
    row["logprobs"][109] = -9.0
    assessment = audited(row)

    assert (assessment.verdict, assessment.first) == ("wrong tokens", 109)


@fixed
@given(seeds)
def test_other_weights_are_found(seed):
    """The values do not correlate."""
    assessment = audited(honest(seed, weights=7))

    assert assessment.verdict == "other weights"
    assert "hardly correlate" in assessment.note


@fixed
@given(seeds, st.sampled_from([0.5, 0.7, 1.4, 2.0]))
def test_another_temperature_has_the_verdict_other_weights(seed, temperature):
    """Values after temperature correlate with those before it, and none are equal."""
    row = honest(seed, temperature=temperature)

    def warmed(value):
        return value and value / temperature - math.log(math.exp(value / temperature) + (1 - math.exp(value)))

    row["logprobs"] = [warmed(value) for value in row["logprobs"]]
    assessment = audited(row)

    assert assessment.verdict == "other weights"
    assert "values correlate" in assessment.note
    assert f"sampled at temperature {temperature}" in assessment.note


def test_a_change_of_weights_between_turns_is_not_a_wrong_token():
    row = honest(11)
    start, end = TURNS[1]
    row["logprobs"][start:end] = scores(row["token_ids"], weights=7)[start:end]
    row["spans"][1]["policy_version"] = "v2"
    assessment = audited(row)

    assert assessment.verdict == "other weights"
    assert "policy version v2" in assessment.note


def test_a_missing_first_id_has_the_verdict_shifted():
    """The context is only nearly right, so that values correlate at an offset without being equal."""
    row = honest(13)
    row["token_ids"] = [*row["token_ids"][1:], 0]

    def nearly(ids):
        near = (prefix_from(ids[max(i - 3, 0) : i + 1]) for i in range(1, len(ids)))
        return [None, *(math.log(chance(prefix, 0)) * 1.05 - 0.02 for prefix in near)]

    honestly = nearly(honest(13)["token_ids"])
    row["logprobs"] = [v if m else None for v, m in zip(honestly, row["mask"], strict=True)]
    assessment = audited(row, scoring=lambda ids: [v and v * 1.04 for v in nearly(ids)])

    assert (assessment.verdict, assessment.offset) == ("shifted", 1)


@pytest.mark.parametrize("trained", [0, 1, 2, 3])
def test_fewer_than_four_tokens_are_never_shifted(trained):
    """Without tokens there is no verdict."""
    row = honest(17)
    row["mask"] = [int(12 <= index < 12 + trained) for index in range(LENGTH)]
    row["logprobs"] = [-1.0 - index if m else None for index, m in enumerate(row["mask"])]
    row["spans"] = []
    assessment = audited(row)

    assert (None if not trained else "other weights") == (assessment and assessment.verdict)


def test_certain_tokens_are_aligned_and_not_informative():
    row = honest(19)
    row["logprobs"] = [-0.0001 if m else None for m in row["mask"]]
    assessment = audited(row, scoring=lambda ids: [None] + [-0.0002] * (len(ids) - 1))

    assert (assessment.verdict, assessment.informative) == ("aligned", 0)


@fixed
@given(seeds)
def test_small_differences_beyond_the_tolerance_are_noted_as_small(seed):
    """They may be due to another precision."""
    draw = random.Random(seed)
    row = honest(seed)
    assessment = audited(row, scoring=lambda ids: [v and v + draw.gauss(0, 0.015) for v in scores(ids)])

    assert assessment.verdict == "other weights"
    assert "differences are small" in assessment.note


@fixed
@given(seeds)
def test_rounding_in_bfloat16_is_never_a_wrong_token(seed):
    """Scores of vLLM 0.32 may agree exactly for the first tokens, and be rounded differently later."""
    draw = random.Random(seed)
    row = honest(seed)

    def rounded(ids):
        exact = scores(ids)
        later = [value + draw.uniform(-0.09, 0.09) for value in exact[34:]]
        return [*exact[:34], *later[:66], later[66] - 0.2, *later[67:]]

    assert audited(row, scoring=rounded, moving=False).verdict == "other weights"


def test_few_values_that_correlate_are_not_noted_as_uncorrelated():
    """A short reply in another precision is not the reply of another model."""
    row = honest(11)
    for index in range(LENGTH):
        if not TURNS[0][0] <= index < TURNS[0][0] + 8:
            row["mask"][index], row["logprobs"][index] = 0, None
    row["spans"] = row["spans"][:1]
    assessment = audited(row, scoring=lambda ids: [value and 1.1 * value - 0.1 for value in scores(ids)], moving=False)

    assert assessment.verdict == "other weights"
    assert "the values correlate" in assessment.note


def pairs(recorded, scored) -> list[Pair]:
    return [Pair(index, *values) for index, values in enumerate(zip(recorded, scored, strict=True))]


def test_values_that_most_tokens_have_are_not_informative():
    """Of 100 tokens, 90 of them certain, 10 are evidence."""
    values = [-0.001] * 90 + [-float(n) for n in range(1, 11)]
    both = pairs(values, values)
    likeness = ChanceModel(both, 0.01)

    assert [likeness.is_informative(pair) for pair in both] == [False] * 90 + [True] * 10
    assert not no_chance(both[:90], likeness)
    assert no_chance(both[90:], likeness)


@pytest.mark.parametrize(("misses", "agree"), [(0, True), (2, True), (3, False)])
def test_at_most_a_tenth_of_the_pairs_may_differ(misses, agree):
    """The ends of spans have no partner at an offset."""
    values = [-float(n) for n in range(20)]
    assert agree == nearly_all_agree(pairs([-100.0 - n for n in range(misses)] + values[misses:], values), 0.01)


def test_few_or_constant_values_never_correlate():
    values = [-float(n) for n in range(30)]

    assert go_together(pairs(values, values))
    assert not go_together(pairs(values[:19], values[:19]))
    assert not go_together(pairs([1.0] * 30, [1.0] * 30))
    assert not go_together([])


def test_the_correlation_and_slope_of_pairs():
    assert pytest.approx((1.0, 2.0)) == line_through(pairs([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))


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

    assert (recorded.name, recorded.branch, recorded.mask_offset) == ("r1", 2, 0)
    assert [(span := recorded.span_at(index)) and span.step_id for index in range(4)] == [None, "S1", "S1", None]
    assert recorded.temperatures == (0.7,)


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
    assert of_row(row(logprobs=[None] * 4)).mask_offset == 0


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

    assert recorded.comparable("raw_logprobs").logprobs == [None, -0.5, -1, None]
    assert recorded.comparable("processed_logprobs").logprobs == [None, None, -1, None]
    assert recorded.comparable("after_temperature_logprobs").logprobs == [None, None, -1, None]


def test_constrained_tokens_are_not_comparable_in_any_mode():
    spans = [
        {"start": 1, "end": 2, "step_id": "S1", "temperature": 1.0, "constrained": True},
        {"start": 2, "end": 3, "step_id": "S2", "temperature": 1.0, "constrained": False},
    ]
    recorded = of_row(row(spans=spans))

    for mode in ("raw_logprobs", "processed_logprobs", "after_temperature_logprobs"):
        assert recorded.comparable(mode).logprobs == [None, None, -1, None]
        count, why = recorded.skipped(mode)
        assert (count, "with a constraint" in why) == (1, True)
    assert of_row(row()).skipped("raw_logprobs") == (0, "")


def test_a_step_is_a_sequence_of_its_prompt_and_a_choice():
    """The prompt has no logprobs."""
    choice = make_choice(1, (7, 8), logprobs=array("f", [-0.5, -1]))
    recorded = of_choice(make_step("S1", (1, 2, 3), choice), choice)

    assert recorded.token_ids == [1, 2, 3, 7, 8]
    assert recorded.logprobs == [None, None, None, -0.5, -1]
    assert (recorded.stretches[0].step_id, recorded.stretches[0].temperature) == ("S1", 1.0)
