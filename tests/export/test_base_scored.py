"""Rows with scores: the fields of each format that has a place for them, at the positions that it trains."""

import io
import re
from array import array
from dataclasses import replace

import pyarrow.ipc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support import worked
from tests.support.forests import forests

from proxy.export import FORMATS, Fill, Inexpressible
from proxy.export.base import with_columns
from proxy.export.containers import CONTAINERS
from proxy.trajectory.sequence import Options, Scores, sequences

LOGPROBS = [-2.0, -3.0, -4.0, -5.0, -6.0]  # of 201 202 9, and of 203 9
TOP_IDS = [11, 12, 21, 22, 31, 32, 41, 42, 51, 52]
TOP = [-0.5, -1.0, -0.5, -1.25, -0.5, -1.5, -0.5, -1.75, -0.5, -2.0]
PLAIN = Scores("big-0", "big", "t1", array("f", LOGPROBS))
LIKELY = replace(PLAIN, top_k=2, top_ids=array("i", TOP_IDS), top_logprobs=array("f", TOP))
FULL = [0.0, 0.0, 0.0, -2.0, -3.0, -4.0, 0.0, 0.0, 0.0, 0.0, -5.0, -6.0]
ADDED = {
    ("verl_dataproto", "proximal"): {"old_log_probs": [[*FULL[3:], 0.0]]},
    ("areal", "proximal"): {"prox_logp": [[*FULL[1:], 0.0]]},
    ("areal", "teacher"): {"teacher_logp": [[*FULL[1:], 0.0]]},
    ("slime", "teacher"): {"teacher_log_probs": FULL[3:]},
    ("scored_data", "teacher"): {"ref_logprobs": [[value or 1.0 for value in FULL]]},
    ("openrlhf_experience", "proximal"): {"action_log_probs": [FULL[1:]]},
    ("openrlhf_experience", "teacher"): {"base_action_log_probs": [FULL[1:]]},
}


LENGTHS = Fill(prompt_length=200, response_length=200)


def fill_for(role, scores=PLAIN):
    return Fill(prompt_length=4, response_length=10, scores=[scores], role=role)


@pytest.mark.parametrize(("name", "role"), ADDED)
def test_a_row_has_the_scores_beside_its_other_fields(name, role):
    """Nothing else changes; what is not trained has the fill value of the format."""
    (plain,) = worked.rows(name, fill=replace(fill_for(role), scores=()))
    (row,) = worked.rows(name, fill=fill_for(role))

    assert plain | ADDED[name, role] == row


def test_prime_rl_has_them_at_the_position_of_ref_logprobs():
    """The array has 14 positions in any case; sampling masks have the last one."""
    (plain,), (row,) = worked.rows("prime_rl"), worked.rows("prime_rl", fill=fill_for("teacher"))

    assert (len(row), row[5]) == (14, FULL)
    assert plain[:5] + plain[6:] == row[:5] + row[6:]


def test_verl_has_a_teachers_tokens_as_its_own_teachers_return_them():
    """Position i is for token i + 1 (`extract_prompt_logprobs`, verl 0.9.1); without likely tokens, it has the token."""
    (row,) = worked.rows("verl", fill=fill_for("teacher"))
    ids = [[0], [0], [201], [202], [9], [0], [0], [0], [0], [203], [9], [0]]

    assert worked.rows("verl")[0]["extra_fields"].items() <= row["extra_fields"].items()
    assert (ids, [[value] for value in [*FULL[1:], 0.0]]) == (
        row["extra_fields"]["teacher_ids"],
        row["extra_fields"]["teacher_logprobs"],
    )


def test_verls_batch_pads_a_teachers_tokens_like_its_rows():
    """The likely ones, the most likely first."""
    (row,) = worked.rows("verl_dataproto", fill=replace(fill_for("teacher", LIKELY), pad_id=7))
    nothing = [0, 0]
    ids = [nothing, nothing, [11, 12], [21, 22], [31, 32], *[nothing] * 4, [41, 42], [51, 52], nothing]

    assert row["teacher_ids"] == [[[7, 7], *ids, [7, 7]]]
    assert row["teacher_logprobs"][0][10] == [-0.5, -1.75]
    assert len(row["input_ids"][0]) == len(row["teacher_logprobs"][0])


def test_atropos_has_a_teachers_likely_tokens_to_distill():
    (row,) = worked.rows("scored_data", fill=fill_for("teacher", LIKELY))

    assert row["distill_token_ids"] == [
        [[0, 0]] * 3 + [[11, 12], [21, 22], [31, 32]] + [[0, 0]] * 4 + [[41, 42], [51, 52]]
    ]
    assert row["distill_logprobs"][0][-1] == [-0.5, -2.0]


def test_the_canonical_row_has_null_where_nothing_is_trained():
    """With what scored it, and the likely tokens."""
    (row,) = worked.rows("sequences", fill=fill_for("teacher", LIKELY))

    assert row["rescored"] == {"engine": "big-0", "model": "big", "policy_version": "t1"}
    assert row["rescored_logprobs"] == [None, None, None, -2.0, -3.0, -4.0, None, None, None, None, -5.0, -6.0]
    assert row["rescored_top_ids"][2:4] == [None, [11, 12]]
    assert row["rescored_top_logprobs"][-1:] == [[-0.5, -2.0]]
    assert worked.rows("sequences")[0]["logprobs"] == row["logprobs"]


@pytest.mark.parametrize("role", ["proximal", "teacher"])
@pytest.mark.parametrize("scores", [PLAIN, LIKELY], ids=["plain", "likely"])
@pytest.mark.parametrize("name", FORMATS)
def test_columns_have_the_scores_of_every_format_with_a_place_for_them(name, role, scores):
    """Arrow returns the same values as the rows; the plan describes what scored each row."""
    form = FORMATS[name]
    if role not in (form.likely if scores.top_k else form.scored):
        return
    scored = with_columns(form, role, likely=scores.top_k > 0)
    plan = scored.plan(worked.FACTS, worked.STEPS, worked.Options(), fill_for(role, scores))
    rows = list(plan.render())
    writer = CONTAINERS["arrow"](scored)
    written = b"".join([writer.opening(), *map(writer.row, rows), writer.closing(None)])
    read = pyarrow.ipc.open_stream(io.BytesIO(written)).read_all().to_pylist()
    named = rows if isinstance(rows[0], dict) else [dict(zip(scored.columns, row, strict=True)) for row in rows]
    added = {key: value for key, value in named[0].items() if key in {**form.scored[role], **form.likely.get(role, {})}}

    assert added
    assert added == {key: read[0][key] for key in added}
    assert [scores.described()] == list(plan.rescored)
    assert form.columns == FORMATS[name].columns


def test_a_group_of_scored_rows_is_gathered():
    """A batch concatenates the scores of its rows."""
    form = FORMATS["verl_dataproto"]
    member = form.rows(worked.FACTS, worked.STEPS, worked.Options(), fill_for("proximal"))

    assert len(form.gather([member, member])["old_log_probs"]) == 2
    assert (PLAIN.described(),) == tuple(member.rescored)


@given(forests(), st.sampled_from([name for name, form in FORMATS.items() if "teacher" in form.scored]))
def test_scores_change_no_other_field_of_any_rollout(steps, name):
    """Each row has its own scores; what a format cannot express, it cannot express with them."""
    facts = replace(worked.FACTS, advantages=0.5)
    steps = [replace(step, policy_version="1") for step in steps]
    found = list(sequences(steps, facts, Options()).each())
    assume(not any(row.trained[0] for row in found))  # no engine scores a token without a prompt
    counts = [sum(row.trained) for row in found]
    scores = [replace(PLAIN, logprobs=array("f", [-1.0 - number] * count)) for number, count in enumerate(counts)]
    form = FORMATS[name]
    try:
        plain = list(form.plan(facts, steps, Options(), LENGTHS).render())
    except Inexpressible as error:
        with pytest.raises(Inexpressible, match=re.escape(str(error))):
            list(form.plan(facts, steps, Options(), replace(LENGTHS, scores=scores)).render())
        return
    plan = form.plan(facts, steps, Options(), replace(LENGTHS, scores=scores))
    rows = list(plan.render())

    assert len(plain) == len(rows) == len(plan.rescored)
    for number, (before, after) in enumerate(zip(plain, rows, strict=True)):
        if isinstance(after, dict):
            kept = {key: value for key, value in after.items() if key in before and key not in form.scored["teacher"]}
            assert {key: value for key, value in before.items() if key in kept} == kept
        else:
            assert [*before[:5], *before[6:]] == [*after[:5], *after[6:]]
        values = [value for value in numbers_in(after, form) if value not in (0.0, 1.0, None)]
        assert [-1.0 - number] * counts[number] == values


def numbers_in(row, form):
    """Return the scores of a row, from the field that the format has for a teacher."""
    named = row if isinstance(row, dict) else dict(zip(form.columns, row, strict=True))
    return named.get("rescored_logprobs") or list(flat([named[key] for key in form.scored["teacher"]]))


def flat(value):
    """Yield the negative numbers of lists and objects, at any depth."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, list | dict):
            yield from flat(inner)
        elif isinstance(inner, float):
            yield inner
