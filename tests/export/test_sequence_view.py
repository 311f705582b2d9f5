"""Every format's rows contain the canonical row: no token is lost or added."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from tests.support import worked
from tests.support.forests import make_choice, make_step, rollouts
from tests.support.reading_rows import BACK, CONVERSATIONS, TURNS, whole

from proxy.export import FORMATS, Fill, Inexpressible, Rows
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
    """The logprobs of the 5 trained positions add up to -1.9375."""
    (row,) = worked.rows(name, fill=LENGTHS)

    assert BACK[name](row) == CANONICAL


@pytest.mark.parametrize("name", TURNS | CONVERSATIONS)
def test_the_turns_are_restored_from_every_format_by_turn(name):
    """The logprobs of the 5 trained positions add up to -1.9375."""
    expected = [(worked.P, worked.S1, worked.L1), ([*worked.P, *worked.S1, *worked.T], worked.S2, worked.L2)]
    rows = worked.rows(name)

    assert expected == ([TURNS[name](row) for row in rows] if name in TURNS else CONVERSATIONS[name](*rows))
    assert sum(logprob for _, _, logprobs in expected for logprob in logprobs) == -1.9375


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

    assert listed == [[0, 0, 3, 4, 5, 0, 0, 0, 0, 10, 11]]
    assert by_step == [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0, 1.0, 2.0]]


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

    assert [ADVANTAGES_OF[name](row) for row in rows] == expected


NAME, WEB = "0f" * 16, "https://example.com/a.png"
PAD = 102  # of worked.P
PLACED = [{"image": NAME, "start": 1, "length": 1}, {"image": WEB, "start": 8, "length": 1}]
WITH_PLACE = {
    "sequences": lambda row: row["images"],
    "steps": lambda row: row["images"],
    "verl": lambda row: row["multi_modal_data"]["images"],
    "slime": lambda row: row["multimodal_inputs"]["images"],
    "openrlhf": lambda row: row["images"],
    "trl": lambda row: row["images"][0],
    "scored_data": lambda row: row["images"][0],
}


def with_images(*names, token=PAD):
    """Return the example's steps; the first image is in the first prompt, others follow the first reply."""
    first = {"request_key": "a", "images": {"ids": list(names[:1]), "token": token}}
    second = {"request_key": "b", "mask_claim": 4, "images": {"ids": list(names), "token": token}}
    ids = [*worked.P, *worked.S1, 301, 302, PAD, 304]
    step = worked.second(extra=second)
    return [worked.first(extra=first), worked.make_step("b", ids, step.choices[0], extra=second, policy_version="4")]


def test_sequences_name_each_image_with_the_place_of_its_placeholder():
    (row,) = worked.rows("sequences", with_images(NAME, WEB))

    assert row["images"] == PLACED
    assert [row["token_ids"][place["start"]] for place in row["images"]] == [PAD, PAD]


def test_packed_rows_have_the_images_too():
    plan = FORMATS["sequences"].plan(worked.FACTS, with_images(NAME, WEB), Options())

    assert [row["images"] for row in plan.pack()] == [PLACED]


def test_images_of_unknown_places_have_null():
    """Steps of one sequence have equal images then."""
    steps = with_images(NAME, token=None)
    (row,) = worked.rows("sequences", steps)

    assert row["images"] == [{"image": NAME, "start": None, "length": None}]


def test_a_row_that_max_len_cuts_has_the_images_that_are_left():
    (row,) = worked.rows("sequences", with_images(NAME, WEB), options=Options(max_len=7))

    assert PLACED[:1] == row["images"]


@pytest.mark.parametrize("name", ["verl", "slime", "openrlhf", "trl", "scored_data"])
def test_trainers_get_references_in_order(name):
    """A path of the control API, or the URL."""
    (row,) = worked.rows(name, with_images(NAME, WEB))

    assert WITH_PLACE[name](row) == [f"/rollouts/r1/images/{NAME}", WEB]


@pytest.mark.parametrize("name", sorted(WITH_PLACE))
def test_rows_without_images_have_no_field_for_them(name):
    for row in worked.rows(name):
        assert not {"images", "multi_modal_data", "multimodal_inputs"} & row.keys()


@pytest.mark.parametrize("name", ["trl", "scored_data"])
def test_all_rows_of_a_batch_have_images_if_one_has(name):
    form = FORMATS[name]
    members = [form.rows(worked.FACTS, steps, Options()) for steps in (worked.STEPS, with_images(NAME, WEB))]

    assert form.gather(members)["images"] == [[], [f"/rollouts/r1/images/{NAME}", WEB]]
    assert "images" not in form.gather([members[0], Rows(members[0].rows, [])])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - WITH_PLACE.keys() - {"atif", "verifiers"}))
def test_formats_without_a_place_for_images_refuse_the_rollout(name):
    """Its ids without the images are another prompt. `atif` and `verifiers` have the images in their messages."""
    with pytest.raises(Inexpressible, match="no place for images; rollout 'r1' has 2"):
        worked.rows(name, with_images(NAME, WEB))
