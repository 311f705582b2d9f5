"""The format `sequences`: the canonical rows."""

from array import array

from tests.support.forests import make_choice, make_step

from proxy.export import FORMATS, Fill
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options

FACTS = RolloutFacts("r1", "g1", reward=0.5)


def test_there_is_one_row_per_branch_and_a_report_line_per_step_that_is_not_trained():
    steps = [make_step("a", [1], [10]), make_step("b", [2], [20], problems=("echo",))]
    found = FORMATS["sequences"].rows(FACTS, steps, Options())

    assert [
        (row["rollout_id"], row["group_id"], row["branch"], row["token_ids"], row["reward"]) for row in found.rows
    ] == [("r1", "g1", 0, [1, 10], 0.5)]
    assert found.skipped == [{"step_id": "b", "why": "echo"}]


def test_tokens_that_were_not_sampled_have_null_or_the_fill_as_logprob():
    steps = [make_step("a", [1], make_choice(0, [1024]))]
    plain, filled = (
        FORMATS["sequences"].rows(FACTS, steps, Options(), Fill(prompt_logprob=value)).rows[0]["logprobs"]
        for value in (None, 0.0)
    )

    assert (plain, filled) == ([None, -1.0], [0.0, -1.0])


def test_rows_without_a_fill_can_be_packed():
    steps = [make_step("a", [1], make_choice(0, [1024]))]
    plain, filled = (
        FORMATS["sequences"].plan(FACTS, steps, Options(), Fill(prompt_logprob=value)) for value in (None, 0.0)
    )
    (row,), (packed,) = plain.render(), plain.pack()

    assert {
        **row,
        "token_ids": array("i", [1, 1024]),
        "mask": bytearray([0, 1]),
        "logprobs": packed["logprobs"],
    } == packed
    assert bytearray([0, 1]) == packed["logprobs"].present
    assert filled.pack is None
