"""Every format's rows contain the canonical row: no token is lost or added."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from tests.support import worked
from tests.support.forests import make_choice, make_step, rollouts
from tests.support.reading_rows import BACK, CONVERSATIONS, TURNS, whole

from proxy.export import FORMATS, Fill, Inexpressible
from proxy.trajectory.advantages import episodes, returns
from proxy.trajectory.facts import number_of
from proxy.trajectory.sequence import Options, sequences

CANONICAL = (
    [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
    [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1],
    [None, None, None, -0.5, -0.25, -0.125, None, None, None, None, -1.0, -0.0625],
)
LENGTHS = Fill(prompt_length=4, response_length=10)


FORKING = ["nodes", "scored_data", "trl_async", "slime", "tinker", "prime_rl", "areal"]


def test_every_format_is_in_back_turns_or_conversations():
    """A new format needs an entry in one of them."""
    assert FORMATS.keys() == BACK.keys() | TURNS.keys() | CONVERSATIONS.keys()


@pytest.mark.parametrize("name", BACK)
def test_the_canonical_row_is_restored_from_every_format(name):
    """5 trained positions, whose logprobs add up to -1.9375."""
    (row,) = worked.rows(name, fill=LENGTHS)

    assert CANONICAL == BACK[name](row)


@pytest.mark.parametrize("name", TURNS | CONVERSATIONS)
def test_the_turns_are_restored_from_every_format_by_turn(name):
    """5 trained positions, whose logprobs add up to -1.9375."""
    expected = [(worked.P, worked.S1, worked.L1), ([*worked.P, *worked.S1, *worked.T], worked.S2, worked.L2)]
    rows = worked.rows(name)

    assert expected == ([TURNS[name](row) for row in rows] if name in TURNS else CONVERSATIONS[name](*rows))
    assert -1.9375 == sum(logprob for _, _, logprobs in expected for logprob in logprobs)


@pytest.mark.parametrize("name", FORKING)
@given(rollouts())
def test_formats_with_several_sequences_have_every_canonical_row(name, steps):
    """Each token is trained once."""
    stamped = [replace(step, policy_version="1") for step in steps if all(map(len, step.prompts))]
    canonical = sequences(stamped, worked.FACTS).rows

    assert [whole(row.token_ids, row.mask, row.logprobs) for row in canonical] == [
        BACK[name](row) for row in worked.rows(name, stamped)
    ]


@pytest.mark.parametrize("name", [name for name in BACK if name != "sequences"])
def test_retokenized_steps_are_rejected_without_logprobs(name):
    step = make_step("a", [1], make_choice(0, [10]), problems=("retokenized",), policy_version="1")

    with pytest.raises(Inexpressible, match="has none for some sampled tokens"):
        worked.rows(name, [step], options=Options(include="retokenized"), fill=LENGTHS)


@pytest.mark.parametrize("name", [name for name in BACK if name != "sequences"])
def test_steps_without_requested_logprobs_are_rejected_with_the_name_of_the_setting(name):
    step = make_step("a", [1], make_choice(0, [10], logprobs=array("f")), policy_version="1")

    with pytest.raises(Inexpressible, match=r"record\.logprobs: off"):
        worked.rows(name, [step], fill=LENGTHS)


def by_token(advantages, steps=worked.STEPS):
    return [row["advantages"] for row in worked.rows("tinker", steps, replace(worked.FACTS, advantages=advantages))]


def test_advantages_are_a_number_or_a_list_or_given_by_step():
    """Numbers, or a list with one number per token."""
    listed = by_token([float(index) for index in range(12)])
    by_step = by_token({"a": 0.5, "b": [1.0, 2.0]})

    assert [[0, 0, 3, 4, 5, 0, 0, 0, 0, 10, 11]] == listed
    assert [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0, 1.0, 2.0]] == by_step


@pytest.mark.parametrize(
    ("advantages", "why"),
    [
        ([1.0] * 11, "a list of advantages that does not match"),
        ({"a": 1.0}, "another number of advantages at step 'b'"),
        ({"a": 1.0, "b": [1.0]}, "another number of advantages at step 'b'"),
        (None, "requires an advantage"),
    ],
)
def test_advantages_of_another_length_are_rejected(advantages, why):
    with pytest.raises(Inexpressible, match=why):
        by_token(advantages)


def test_a_list_of_advantages_is_rejected_for_several_sequences():
    with pytest.raises(Inexpressible, match="a list of advantages that does not match"):
        by_token([0.0, 1.0], [make_step("a", [1], [10]), make_step("b", [2], [20])])


@pytest.mark.parametrize(
    ("version", "number"), [("3", 3), ("007", 7), (None, None), ("", None), ("v3", None), ("²", None)]
)
def test_a_policy_version_of_digits_is_a_number(version, number):
    assert number == number_of(version)


GIVEN_REWARDS = {"a": [0.5, 0.25, 0.125], "b": [2.0, 4.0]}


def numbers_in(value):
    """Return all numbers in a row, as lists of the numbers that are next to each other."""
    if isinstance(value, list) and value and all(isinstance(number, int | float) for number in value):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for part in inner for found in numbers_in(part)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_rewards_by_token_where_it_has_a_place_for_them(name):
    """All formats by token have each of them; formats by step have their sums; others have neither."""
    facts = replace(worked.FACTS, step_rewards=GIVEN_REWARDS)
    rows = worked.rows(name, facts=facts, fill=LENGTHS)
    flat = [number for numbers in numbers_in(rows) for number in numbers]
    turns = rows[0]["steps"] if name == "atif" else rows
    sums = [
        row["reward"]
        for row in (turn.get("extra", turn) for turn in turns if isinstance(turn, dict))
        if "reward" in row
    ]

    assert (FORMATS[name].reward_place == "token") == ({0.125, 4.0} <= {*flat})
    assert (FORMATS[name].reward_place == "turn") == (sums == [0.875, 6.0])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_advantages_of_turns_where_it_has_a_place_for_them(name):
    """A format with one advantage for a rollout rejects them; other formats have no advantage."""
    facts = replace(worked.FACTS, advantages={"a": 0.375, "b": -0.875})
    place = FORMATS[name].advantage_place
    if place == "rollout":
        with pytest.raises(Inexpressible, match="one advantage per rollout"):
            worked.rows(name, facts=facts, fill=LENGTHS)
        return
    rows = worked.rows(name, facts=facts, fill=LENGTHS)
    flat = {number for numbers in numbers_in(rows) for number in numbers}
    of_rows = {row["advantage"] for row in rows if isinstance(row, dict) and "advantage" in row}

    assert (place == "token") == ({0.375, -0.875} <= flat or name == "sequences")
    assert (place == "turn") == (of_rows == {0.375, -0.875})
    if name == "sequences":
        assert [facts.advantages] == [row["advantages"] for row in rows]


ADVANTAGES_OF = {
    "scored_data": lambda row: row["advantages"][0],
    "tinker": lambda row: [0.0, *row["advantages"]],
    "prime_rl": lambda row: row[12],
}


def test_every_format_with_advantages_by_token_is_read_back():
    assert ADVANTAGES_OF.keys() == {name for name, form in FORMATS.items() if form.advantage_place == "token"} - {
        "sequences"
    }


@pytest.mark.parametrize("name", ADVANTAGES_OF)
@given(rollouts())
def test_each_trained_token_has_the_return_of_its_turn(name, steps):
    """Context and prompts have 0."""
    steps = [
        replace(step, policy_version="1", sampling={"temperature": 1.0})
        for step in steps
        if all(map(len, step.prompts))
    ]
    played = episodes(steps, worked.FACTS, Options())[0]
    facts = replace(worked.FACTS, step_rewards={step.step_id: 2.0**-n for n, step in enumerate(steps)})
    turns = played.turns(facts)
    found = dict(zip(turns, returns(turns, facts, 0.5), strict=True))
    expected = []
    for row in sequences(steps, facts).rows:
        expected.append([0.0] * len(row.token_ids))
        for span in row.spans:
            if span.owned:
                expected[-1][span.start : span.end] = [found[span.step_id]] * (span.end - span.start)

    rows = worked.rows(name, steps, replace(facts, advantages=found))

    assert expected == [ADVANTAGES_OF[name](row) for row in rows]
