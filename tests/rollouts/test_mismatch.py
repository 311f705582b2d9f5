"""Sums of mismatches add up in any order, are checked, and name their cause."""

import copy
from functools import reduce

import numpy as np
import pytest

from benchmarks.mismatch import CAUSES, RULES, SEEDS, TURN, TURNS, VERSION, Batch, simulated, verdicts
from proxy.rollouts.mismatch import contradiction, described, merged, tokens_of, verdicts_of
from proxy.telemetry.metrics import MISMATCHES
from tokentape.mismatch_sums import mismatch


def sums_of(cause="bfloat16", *, version=VERSION, rows=slice(None)):
    batch = Batch(np.random.default_rng(1))
    CAUSES[cause][0](batch)
    claimed, logprobs = simulated(batch)
    return mismatch(claimed[rows], logprobs[rows], policy_version=version)


def named(sums):
    return [verdict.verdict for verdict in verdicts_of(sums, RULES)]


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_verdict_and_no_other(cause):
    """Also where tasks of one endpoint, and first tokens of replies, are less certain than others."""
    expected = CAUSES[cause][1]

    assert [verdicts(cause, seed) for seed in range(SEEDS)] == [expected] * SEEDS


def test_parts_have_the_sums_of_all_rows():
    whole, expected = sums_of(), reduce(merged, [sums_of(rows=slice(start, start + 4)) for start in range(0, 16, 4)])

    assert contradiction(expected) is None
    assert tokens_of(whole) == tokens_of(expected) == 16 * 6 * 32
    assert described(whole)["cells"]["all"]["all"] == pytest.approx(
        described(expected)["cells"]["all"]["all"], abs=1e-9
    )
    assert whole["neighbours"][0] == expected["neighbours"][0]
    assert whole["sequences"] == pytest.approx(expected["sequences"], abs=8)


def test_a_direction_and_an_endpoint_are_named():
    (raw,) = verdicts_of(sums_of("temperature 0.7, engine raw"), RULES)
    (divided,) = verdicts_of(sums_of("temperature 0.7, trainer raw"), RULES)
    (stale,) = verdicts_of(sums_of("one endpoint with older weights"), RULES)
    (first,) = verdicts_of(sums_of("first tokens over other positions"), RULES)
    (later,) = verdicts_of(sums_of("later replies over other positions"), RULES)

    assert raw.of == divided.of == "0.7"
    assert raw.why.startswith("the trainer divides")
    assert divided.why.startswith("the trainer does not divide")
    assert (stale.of, first.of, later.of) == ("engine-1", "first", "later")


def changed_by(size, where, **fields):
    """Return the sums of a batch that the engine sampled with other logits at some tokens."""
    batch = Batch(np.random.default_rng(4), **fields)
    batch.engine_only = batch.changed(size, where(batch))
    rows, logprobs = simulated(batch)
    return mismatch(rows, logprobs, policy_version=VERSION)


def is_later(batch):
    """Return which tokens are of a reply that follows another one."""
    return np.arange(batch.tokens) % (TURNS * TURN) >= TURN


@pytest.mark.parametrize("size", [0.5, 1, 1.5, 2])
@pytest.mark.parametrize("certainty", [0.4, 1])
def test_weights_far_away_are_no_temperature(certainty, size):
    """Logprobs of sampled tokens are high: those of other weights are nearer to their mean, which is a slope as well."""
    assert named(changed_by(size, lambda batch: batch.rows >= 0, certainty=certainty)) == ["unexplained"]


def test_few_rows_with_other_contexts_are_no_tail():
    assert named(changed_by(3.0, lambda batch: is_later(batch) & (batch.rows % 8 < 2))) == ["boundaries"]


def test_replies_that_are_more_often_of_older_weights_are_no_fault_of_boundaries():
    older = changed_by(0.1, lambda batch: is_later(batch) & (batch.rows % 4 > 0), versions=("7", "6", "6", "6"))

    assert named(older) == ["lag"]


def test_without_tokens_of_the_reported_version_verdicts_about_weights_are_unknown():
    assert named(sums_of("one endpoint with older weights", version="9")) == ["unknown"]
    assert named(sums_of("experts routed otherwise", version="9")) == ["unknown"]  # as of older weights
    assert named(sums_of("first tokens over other positions", version="9")) == ["boundaries", "unknown"]
    assert named(sums_of("rows shifted by one", version="9")) == ["shifted"]


def test_a_difference_between_unknown_temperatures_is_described():
    rows, _ = simulated(Batch(np.random.default_rng(1)))
    for row in rows:
        row["spans"] = [{**span, "temperature": None} for span in row["spans"]]
    scaled = [1.3 * row["logprobs"][row["mask"]] for row in rows]
    (verdict,) = verdicts_of(mismatch(rows, scaled, policy_version=VERSION), RULES)

    assert (verdict.verdict, verdict.of) == ("temperature", "unknown")
    assert "a temperature of about 0.77 times the engine's" in verdict.why


def of_older_rows(fresh, size):
    """Return the sums of a batch of which one row of `fresh` is of the reported version, the others of older weights."""
    batch = Batch(np.random.default_rng(2), versions=("7", *["6"] * (fresh - 1)))
    batch.engine_only = batch.changed(size, batch.rows % fresh > 0)
    rows, logprobs = simulated(batch)
    return mismatch(rows, logprobs, policy_version=VERSION)


@pytest.mark.parametrize("size", [0.0, 0.15, 0.5])
def test_few_tokens_of_the_reported_version_are_as_none(size):
    """Older weights explain any difference, also a tail, and 192 tokens are too few to compare."""
    assert named(of_older_rows(16, size)) == ["unknown"]
    assert (["lag"] if size else ["numeric"]) == named(of_older_rows(4, size))


@pytest.mark.parametrize(
    ("cause", "threshold"),
    [
        ("bfloat16", {"numeric": 1e-4}),
        ("temperature 0.7, engine raw", {"slope": 0.9}),
        ("one endpoint with older weights", {"endpoint_ratio": 9.0}),
        ("first tokens over other positions", {"boundary_ratio": 99.0}),
        ("rows of older versions", {"lag_ratio": 9.0}),
        ("experts routed otherwise", {"tail_share": 0.1}),
        ("rows shifted by one", {"min_tokens": 4000}),
    ],
)
def test_a_threshold_is_a_setting(cause, threshold):
    (usual,), (other,) = (verdicts_of(sums_of(cause), RULES._replace(**own)) for own in ({}, threshold))

    assert {usual.verdict} == CAUSES[cause][1]
    assert usual.verdict != other.verdict


def test_metrics_have_each_verdict():
    given = {verdict for _, verdicts in CAUSES.values() for verdict in verdicts}

    assert given | {"unknown", "too_few"} == set(MISMATCHES)


def test_ratios_of_whole_rows_are_described():
    shown = described(sums_of())["sequences"]

    assert shown["rows"] == 16
    assert abs(shown["mean"]) <= shown["abs_mean"] <= shown["square_mean"] ** 0.5 < 2
    assert None is described(mismatch([], [], policy_version="7"))["sequences"]["mean"]


def test_few_tokens_have_no_verdict():
    assert named(sums_of("rows shifted by one", rows=slice(1))) == ["too_few"]
    assert named(mismatch([], [], policy_version="7")) == ["too_few"]


def change_histogram(sums):
    sums["cells"]["all"]["all"]["histogram"][3] += 1


def change_count(sums):
    sums["cells"]["place"]["rest"]["bins"][2][0] += 1
    sums["cells"]["place"]["rest"]["histogram"][2] += 1


def change_size(sums):
    sums["cells"]["all"]["all"]["bins"][6][2] = 0


def change_square(sums):
    sums["cells"]["all"]["all"]["bins"][6][3] //= 10


def drop_dimension(sums):
    del sums["cells"]["lag"]


def drop_all(sums):
    sums["cells"]["more"] = sums["cells"].pop("all")


def add_empty(sums):
    sums["cells"]["lag"]["9"] = {"bins": [[0] * 5 for _ in range(12)], "histogram": [0] * 64, "tail": 0}


def change_tail(sums):
    sums["cells"]["all"]["all"]["tail"] = 10**6


def change_uncertain(sums):
    sums["uncertain"][0] += 10**6


def change_neighbours(sums):
    sums["neighbours"][1] = -1


def change_slope(sums):
    sums["slopes"]["1"][0] = 0


def add_support(sums):
    sums["support"]["none"] = [5, 0, 0, 6, 1]


def add_slope(sums):
    sums["slopes"]["0.9"] = sums["slopes"]["1"]


def change_sequences(sums):
    sums["sequences"][2] = 0


@pytest.mark.parametrize(
    "change",
    [
        change_histogram, change_count, change_size, change_square, drop_dimension, add_empty, change_tail, change_uncertain,
        change_neighbours, change_slope, add_support, drop_all, add_slope, change_sequences,
    ],
)  # fmt: skip
def test_sums_that_no_tokens_have_contradict_each_other(change):
    sums = copy.deepcopy(sums_of())
    assert contradiction(sums) is None
    change(sums)

    assert contradiction(sums)


@pytest.mark.parametrize("cause", CAUSES)
def test_sums_of_tokens_never_contradict_each_other(cause):
    assert contradiction(sums_of(cause)) is None
