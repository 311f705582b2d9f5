"""Sums of the differences between a trainer's logprobs and the recorded ones."""

from array import array
from dataclasses import replace
from time import process_time

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import worked
from tests.support.forests import unique_forests
from tests.support.reading_rows import CONVERSATIONS, trained_ids

import tokentape
from proxy.export import FORMATS, Fill, Inexpressible
from proxy.rollouts.mismatch import contradiction
from proxy.trajectory.sequence import Options
from tokentape.mismatch_sums import elsewhere, located, mismatch, report

SPAN = {"choice": 0, "policy_version": "7", "temperature": 1.0, "owned": True, "endpoint": "e", "engine": "vllm"}


def span(start, end, step="s", **fields):
    return {**SPAN, "start": start, "end": end, "step_id": step, **fields}


def row(*spans, logprobs=None, length=None, **fields):
    """Return a row with these spans; its recorded logprobs are -1."""
    length = length or spans[-1]["end"]
    mask = [0] * length
    for each in spans:
        if each["owned"]:
            mask[each["start"] : each["end"]] = [1] * (each["end"] - each["start"])
    recorded = [-1.0 if bit else None for bit in mask] if logprobs is None else logprobs
    return {"rollout_id": "r", "branch": 0, "mask": mask, "logprobs": recorded, "spans": list(spans), **fields}


def tokens(sums, dimension):
    """Return how many tokens each value of a dimension has."""
    return {value: sum(cell["histogram"]) for value, cell in sums["cells"][dimension].items()}


def test_tokens_are_counted_by_what_is_known_of_them():
    first = row(
        span(2, 12, policy_version="6"),
        span(12, 14),
        span(20, 23, "t", temperature=0.5, constrained=False, top_p=0.9, logprobs_mode="raw_logprobs", model="lora"),
        length=30,
    )
    second = row(span(1, 3, owned=False), span(5, 6, "t", endpoint="f"), branch=1)
    sums = tokentape.mismatch([first, second], [np.full(15, -1.5), [-1.0]], policy_version=7)

    assert tokens(sums, "lag") == {"0": 6, "1": 10}
    assert tokens(sums, "temperature") == {"1": 13, "0.5": 3}
    assert tokens(sums, "boundary") == {"start": 12, "continued": 3, "forked": 1}
    assert tokens(sums, "place") == {"first": 12, "rest": 4}
    assert tokens(sums, "truncation") == {"none": 13, "top_p=0.9 raw": 3}
    assert tokens(sums, "engine") == {"vllm unknown": 13, "vllm raw_logprobs": 3}
    assert tokens(sums, "constrained") == {"unknown": 13, "false": 3}
    assert tokens(sums, "model") == {"unknown": 13, "lora": 3}
    assert tokens(sums, "position") == {"0000": 16}
    assert tokens(sums, "endpoint") == {"e": 2}  # of the reported version, after the first 8
    assert [sum(column) for column in zip(*sums["cells"]["all"]["all"]["bins"], strict=True)][:4] == [
        16,
        -7_500_000_000,
        7_500_000_000,
        3_750_000_000,
    ]
    assert sums["sequences"] == [2, -7_500_000_000, 7_500_000_000, 56_250_000_000]


def test_tokens_without_a_logprob_on_either_side_are_not_counted():
    sums = mismatch([row(span(0, 3), logprobs=[-1.0, None, -1.0])], [[np.nan, -1.0, -1.0]], policy_version="7")

    assert tokens(sums, "all") == {"all": 1}
    assert sums["neighbours"][0] == 0


def test_tokens_whose_logprobs_a_grammar_changed_are_in_one_cell_only():
    """A forward pass gives them other logprobs, which is no fault."""
    rows = [row(span(0, 3), span(3, 9, "t", constrained=True), span(9, 11, "u", constrained=False))]
    sums = mismatch(rows, [[-1.0] * 3 + [-9.0] * 6 + [-1.0] * 2], policy_version="7")

    assert tokens(sums, "constrained") == {"unknown": 3, "true": 6, "false": 2}
    assert tokens(sums, "all") == {"all": 5}
    assert tokens(sums, "boundary") == {"start": 3, "continued": 2}
    assert [sums["sequences"][1], sums["neighbours"][3], sums["cells"]["all"]["all"]["tail"]] == [0, 0, 0]
    assert contradiction(sums) is None


def test_versions_that_cannot_be_compared_have_an_unknown_lag():
    rows = [row(span(0, 1, policy_version=version)) for version in (None, "x", "7", "9")]
    rows += [row(span(0, 1)), row(span(0, 1, epoch=1))]
    sums = mismatch(rows, [[-1.0]] * 6, policy_version="7")

    assert tokens(sums, "lag") == {"unknown": 5, "0": 1}


def test_rare_values_are_counted_together():
    rows = [row(span(0, 10, temperature=0.01 * number)) for number in range(1, 31)]
    counted = tokens(mismatch(rows, [[-1.0] * 10] * 30, policy_version="7"), "temperature")

    assert len(counted) == 17
    assert counted["other"] == 140


@pytest.mark.parametrize("values", [3, 40])
def test_a_value_that_is_named_other_is_counted_with_the_rare_ones(values):
    """Its tokens were lost beside rare values, so that the sums contradicted each other."""
    rows = [row(span(0, 10, model=f"m{number}" if number else "other")) for number in range(values)]
    sums = mismatch([*rows, rows[0]], [[-1.0] * 10] * (values + 1), policy_version="7")

    assert contradiction(sums) is None
    assert 10 * max(2, values - 15) == tokens(sums, "model")["other"]


@pytest.mark.parametrize(
    ("changed", "values", "match"),
    [
        ({}, [-1.0], "row 1 .*'r'.* 3 trained tokens"),
        ({}, [-1.0, -np.inf, -1.0], "row 1 .* infinite"),
        ({}, [-1.0, [-1.0], -1.0], "row 1 .* not a list of numbers"),
        ({}, [[-1.0]] * 3, "row 1 .* shape"),
        ({"spans": None}, [-1.0] * 3, "row 1 .* no spans; claim with format=sequences"),
        ({"spans": [span(0, 2)]}, [-1.0] * 3, "row 1 .* spans"),
        ({"spans": [span(2, 1)]}, [-1.0] * 3, "row 1 .* from 2 to 1"),
        ({"logprobs": [-1.0]}, [-1.0] * 3, "row 1 .* 1 logprobs"),
    ],
)
def test_an_error_names_the_row(changed, values, match):
    whole = row(span(0, 3))
    with pytest.raises(ValueError, match=match):
        mismatch([whole, whole | changed], [[-1.0] * 3, values], policy_version="7")


def test_each_row_has_logprobs():
    with pytest.raises(ValueError, match="1 rows have 0"):
        mismatch([row(span(0, 3))], [], policy_version="7")


def test_a_report_has_the_branches_of_its_rows():
    rows = [row(span(0, 1)), row(span(0, 1), branch=1)]
    batch_id, body = report(Claimed(), rows, [[-1.0]] * 2, policy_version=7, rank=2)

    assert (batch_id, body["rows"], body["policy_version"], body["rank"]) == ("b", {"r": [0, 1]}, "7", 2)
    assert report("c", rows, [[-1.0]] * 2, policy_version=7, rank=2) == ("c", body)


@pytest.mark.parametrize(
    ("changed", "match"), [({"rollout_id": "q"}, "row 1 .*'q'.* not of the batch"), ({}, "row 1 .* twice")]
)
def test_a_report_with_a_row_of_another_batch_or_a_repeated_one_is_refused(changed, match):
    rows = [row(span(0, 1)), row(span(0, 1)) | changed]
    with pytest.raises(ValueError, match=match):
        report(Claimed(), rows, [[-1.0]] * 2, policy_version=7, rank=0)


class Claimed:
    """A batch with rows at these places."""

    batch_id = "b"

    def __init__(self, places=({"rollout_id": "r"},)):
        self.claimed = {"groups": [{"rows": list(places)}]}


def logged(step):
    """Return a step whose logprobs show the ids of their tokens."""
    choices = [replace(it, logprobs=array("f", [-float(token) for token in it.ids])) for it in step.choices]
    return replace(step, choices=tuple(choices))


@given(unique_forests(), st.sampled_from(sorted(FORMATS.keys() - CONVERSATIONS.keys() - {"steps"})))
def test_rows_of_any_format_are_found_by_what_a_claim_has_of_them(steps, name):
    """Each trained token is compared with its own recorded logprob. `steps` has rows that no sequence has: replaced ones."""
    steps, fill = [*map(logged, steps)], Fill(prompt_length=64, response_length=64)
    canonical = FORMATS["sequences"].rows(worked.FACTS, steps, Options()).rows
    try:
        found = FORMATS[name].rows(worked.FACTS, steps, Options(), fill)
    except Inexpressible:
        return
    places = [{"rollout_id": "r1", "step_ids": list(ids), "branch": {}} for ids in found.trained]
    logprobs = [
        [-float(token) for token in trained_ids(name, each)] if place["step_ids"] else []
        for place, each in zip(places, found.rows, strict=True)
    ]
    rows = located(Claimed(places), places, {"r1": canonical})
    _, body = report(Claimed(places), rows, logprobs, policy_version=3, rank=0)
    cells = body["sums"]["cells"]["all"]

    assert set(elsewhere(places)) <= {"r1"}
    assert body["sums"]["sequences"][0] == sum(map(bool, logprobs))
    assert len(body["rows"].get("r1", [])) == sum(map(bool, logprobs))
    if cells:
        assert sum(map(sum, (row["mask"] for row in canonical))) == cells["all"]["histogram"][0]


def test_a_row_is_found_by_its_branch_or_its_rollout_alone():
    first, second = row(span(0, 1)), row(span(0, 1, owned=False), span(2, 4, "t"), branch=1)
    places = [{"rollout_id": "r", "branch": 1}, {"rollout_id": "r", "branch": 0}, "q", row(span(0, 1), rollout_id="p")]

    assert elsewhere(places) == ["r", "q"]
    assert [second, first, {**first, "rollout_id": "q"}, places[3]] == located(
        "b", places, {"r": [first, second], "q": [{**first, "rollout_id": "q"}]}
    )


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("r", "row 1 .*'r'.* 2 rows of its rollout are at its place, 1 are given"),
        ({"rollout_id": "r", "branch": 2}, "row 1 .* 0 rows"),
        ({"rollout_id": "r", "step_ids": ["u"]}, "row 1 .* 0 rows .* options of the export"),
        ({"token_ids": [1]}, "row 1 has no rollout_id: pass the entries of `rows`"),
    ],
)
def test_a_row_without_a_place_or_with_several_is_named(place, match):
    rows = [row(span(0, 1)), place]
    with pytest.raises(ValueError, match=match):
        elsewhere(rows)
        located("b", rows, {"r": [row(span(0, 1)), row(span(0, 1), branch=1)]})


def test_logprobs_can_be_a_tensor():
    """On any device, and of any precision."""

    class Tensor(list):
        def detach(self):
            return Tensor(self)

        float = cpu = detach

    sums = mismatch([row(span(0, 3))], [Tensor([-1.5] * 3)], policy_version="7")

    assert tokens(sums, "all") == {"all": 3}


def test_several_choices_of_a_step_are_found_in_their_order_and_without_the_claim_only_by_branch():
    """The second row is one turn of a step whose other turn is in the first row."""
    rows = [row(span(0, 1), span(2, 3, "t")), row(span(0, 2, choice=1), branch=1)]
    turns = [{"rollout_id": "r", "step_ids": [step]} for step in "sst"]
    found = located(Claimed(turns), turns, {"r": rows})

    assert [(each["spans"][0]["start"], len(each["mask"])) for each in found] == [(0, 1), (0, 2), (2, 3)]
    assert len({each["branch"] for each in found} - {0, 1}) == 3
    with pytest.raises(ValueError, match="row 0 .* 2 rows .* 1 are given"):
        located(Claimed(turns), turns[1:], {"r": rows})
    with pytest.raises(ValueError, match="row 0 .* 0 rows .* Name the branch"):
        located("b", turns[:1], {"r": rows})


def test_a_row_that_the_trainer_cut_has_fewer_logprobs():
    sums = mismatch([row(span(0, 3))], [[-1.0]], policy_version="7", cut=True)

    assert tokens(sums, "all") == {"all": 1}
    with pytest.raises(ValueError, match="row 0 .* 3 trained tokens"):
        mismatch([row(span(0, 3))], [[-1.0] * 4], policy_version="7", cut=True)


def test_a_million_tokens_take_seconds_and_kilobytes():
    """0.9 s of CPU and 14 kB on one core of a shared machine; the limits are those that a trainer would notice."""
    spans = [span(1000 + 400 * turn, 1400 + 400 * turn, f"s{turn}", endpoint=f"e{turn % 2}") for turn in range(10)]
    noise = np.random.default_rng(0)
    rows, logprobs = [], []
    for _ in range(250):
        recorded = [None] * 1000 + (-noise.exponential(0.5, 4000)).tolist()
        rows.append(row(*spans, logprobs=recorded))
        logprobs.append(np.array(recorded[1000:]) + noise.normal(0, 0.01, 4000))
    started = process_time()
    sums = mismatch(rows, logprobs, policy_version="7")

    assert process_time() - started < 10
    assert tokens(sums, "all") == {"all": 1_000_000}
    assert len(orjson.dumps(sums)) < 60_000
