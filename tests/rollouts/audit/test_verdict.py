"""The judgement of recorded logprobs, with a model that is a function of the prefix."""

import math
import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.rollouts.audit.sample import OFFSETS, of_row
from proxy.rollouts.audit.verdict import judge, may_be_moved, moved_ids
from proxy.simulator.distribution import mix, prefix_from

TOLERANCE = 0.01
PROMPT, TURNS = 12, ((12, 60), (70, 110))
LENGTH = 112
seeds = st.integers(0, 10_000)


def chance(prefix, weights) -> float:
    """How likely a prefix's last token is after the others: half of them are certain, as most of a good model's are."""
    bits = mix(prefix.hash ^ mix(weights))
    return 0.9999 if bits & 1 else (bits >> 11) / 2**53 * 0.98 + 0.01


def scores(ids, weights=0) -> list[float | None]:
    prefixes = list(accumulate(ids[1:], lambda prefix, token: prefix.with_token(token), initial=prefix_from(ids[:1])))
    return [None, *(math.log(chance(prefix, weights)) for prefix in prefixes[1:])]


def honest(seed: int, weights=0, temperature=1.0) -> dict:
    """A row of two sampled turns."""
    draw = random.Random(seed)
    ids = [draw.randrange(4096) for _ in range(LENGTH)]
    mask = [int(any(start <= place < end for start, end in TURNS)) for place in range(LENGTH)]
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
    """The finding, as the run comes to it: moved ids are scored only where that may tell something."""
    recorded = of_row(row)
    scored = scoring(recorded.token_ids)
    finding = judge(recorded, scored, TOLERANCE)
    if moving and may_be_moved(finding, recorded, scored):
        moved = {offset: scoring(moved_ids(recorded.token_ids, offset)) for offset in OFFSETS}
        finding = judge(recorded, scored, TOLERANCE, moved)
    return finding


def rolled(values: list, by: int) -> list:
    return values[-by:] + values[:-by]


@given(seeds, st.floats(0, 0.009))
def test_honest_rows_are_aligned(seed, noise):
    """Also where the engine's arithmetic differs by less than the tolerance."""
    row = honest(seed)
    finding = audited(row, scoring=lambda ids: [v and v - noise for v in scores(ids)])

    assert ("aligned", 88, None) == (finding.verdict, finding.count, finding.first)
    assert finding.max <= 0.01


@given(seeds, st.sampled_from(OFFSETS))
def test_moved_ids_are_shifted(seed, by):
    """Ids that stand some places too late or too early against mask and logprobs."""
    row = honest(seed)
    row["token_ids"] = rolled(row["token_ids"], by)
    finding = audited(row)

    assert ("shifted", -by) == (finding.verdict, finding.offset)
    assert "ids are" in finding.note


@given(seeds, st.sampled_from(OFFSETS))
def test_moved_logprobs_are_shifted(seed, by):
    """Mask and logprobs together, over ids that are right."""
    row = honest(seed)
    row |= {"mask": rolled(row["mask"], by), "logprobs": rolled(row["logprobs"], by)}
    finding = audited(row)

    assert ("shifted", by) == (finding.verdict, finding.offset)
    assert "mask and logprobs are" in finding.note


@given(seeds, st.sampled_from(OFFSETS), st.booleans())
def test_a_moved_mask_is_shifted(seed, by, lost):
    """The mask alone, whether what is moved over the end is lost or comes in again at the start."""
    row = honest(seed)
    mask = rolled(row["mask"], by)
    if lost:
        mask[slice(by) if by > 0 else slice(by, None)] = [0] * abs(by)
    finding = audited(row | {"mask": mask})

    assert ("shifted", by) == (finding.verdict, finding.offset)
    assert "the mask is" in finding.note


@given(seeds, st.integers(30, LENGTH - 4))
def test_a_replaced_token_is_found_where_it_is(seed, at):
    """The first difference is at the token, or at the first sampled one after it that is scored otherwise."""
    row = honest(seed)
    row["token_ids"][at] += 1
    finding = audited(row)
    if finding.verdict in ("aligned", "other weights"):  # too few sampled tokens may follow to locate a difference
        assert at >= 100
        return

    assert "wrong tokens" == finding.verdict
    assert at <= finding.first
    trained = [place for place in range(at, finding.first) if row["mask"][place]]
    assert all(abs(scores(row["token_ids"])[place] - row["logprobs"][place]) <= TOLERANCE for place in trained)


def test_a_wrong_id_that_was_not_sampled_is_told_as_a_range():
    """A tool's result between two turns that is not the one the model read."""
    row = honest(3)
    row["token_ids"][64] += 1
    finding = audited(row)

    assert "wrong tokens" == finding.verdict
    assert 70 <= finding.first <= 73
    assert f"one of 60 to {finding.first}" in finding.note


def test_the_last_token_alone_is_enough():
    """Nothing follows it that would be scored otherwise."""
    row = honest(5)
    row["logprobs"][109] = -9.0
    finding = audited(row)

    assert ("wrong tokens", 109) == (finding.verdict, finding.first)


@given(seeds)
def test_other_weights_are_told(seed):
    """Another model altogether: nothing goes together."""
    finding = audited(honest(seed, weights=7))

    assert "other weights" == finding.verdict
    assert "hardly correlate" in finding.note


@given(seeds, st.sampled_from([0.5, 0.7, 1.4, 2.0]))
def test_another_temperature_is_told_as_other_weights(seed, temperature):
    """Recorded after temperature, scored before it: closely together, and equal nowhere."""
    row = honest(seed, temperature=temperature)

    def warmed(value):
        return value and value / temperature - math.log(math.exp(value / temperature) + (1 - math.exp(value)))

    row["logprobs"] = [warmed(value) for value in row["logprobs"]]
    finding = audited(row)

    assert "other weights" == finding.verdict
    assert "values correlate" in finding.note
    assert f"sampled at temperature {temperature}" in finding.note


def test_a_change_of_weights_in_the_middle_is_no_wrong_token():
    """The turn that differs was sampled by other weights than the one that agrees."""
    row = honest(11)
    start, end = TURNS[1]
    row["logprobs"][start:end] = scores(row["token_ids"], weights=7)[start:end]
    row["spans"][1]["policy_version"] = "v2"
    finding = audited(row)

    assert "other weights" == finding.verdict
    assert "policy version v2" in finding.note


def test_an_id_lost_at_the_start_is_shifted():
    """The engine's context is nearly right only: values go together at an offset, and are equal nowhere."""
    row = honest(13)
    row["token_ids"] = [*row["token_ids"][1:], 0]

    def nearly(ids):
        near = (prefix_from(ids[max(i - 3, 0) : i + 1]) for i in range(1, len(ids)))
        return [None, *(math.log(chance(prefix, 0)) * 1.05 - 0.02 for prefix in near)]

    honestly = nearly(honest(13)["token_ids"])
    row["logprobs"] = [v if m else None for v, m in zip(honestly, row["mask"], strict=True)]
    finding = audited(row, scoring=lambda ids: [v and v * 1.04 for v in nearly(ids)])

    assert ("shifted", 1) == (finding.verdict, finding.offset)


@pytest.mark.parametrize("trained", [0, 1, 2, 3])
def test_few_tokens_are_never_called_shifted(trained):
    """What could be chance is not believed; where there is nothing, there is no finding."""
    row = honest(17)
    row["mask"] = [int(12 <= place < 12 + trained) for place in range(LENGTH)]
    row["logprobs"] = [-1.0 - place if m else None for place, m in enumerate(row["mask"])]
    row["spans"] = []
    finding = audited(row)

    assert (None if not trained else "other weights") == (finding and finding.verdict)


def test_certain_tokens_tell_nothing():
    """A row that agrees because every token was certain is aligned, and says that none of them is evidence."""
    row = honest(19)
    row["logprobs"] = [-0.0001 if m else None for m in row["mask"]]
    finding = audited(row, scoring=lambda ids: [None] + [-0.0002] * (len(ids) - 1))

    assert ("aligned", 0) == (finding.verdict, finding.informative)


@given(seeds)
def test_differences_just_beyond_the_tolerance_are_called_small(seed):
    """Another precision is not a wrong token."""
    draw = random.Random(seed)
    row = honest(seed)
    finding = audited(row, scoring=lambda ids: [v and v + draw.gauss(0, 0.015) for v in scores(ids)])

    assert "other weights" == finding.verdict
    assert "differences are small" in finding.note
