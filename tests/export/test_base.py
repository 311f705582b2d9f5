"""Properties of all formats, and the types of their columns."""

from copy import deepcopy
from dataclasses import replace
from math import fsum

import pytest
from tests.support import worked
from tests.support.forests import make_step
from tests.support.reading_rows import CONVERSATIONS

from proxy.export import _ALL, FORMATS, Fill, Inexpressible
from proxy.export.base import PLAIN, Forked, MissingAdvantage, MissingReward, skipped_rows
from proxy.trajectory.sequence import Options, Skipped

LENGTHS = Fill(prompt_length=4, response_length=10)
FORK = [make_step("a", [1], [10, 9], policy_version="1"), make_step("b", [2, 3], [20, 9], policy_version="1")]
# The trainer takes one row for each rollout (docs/trainers.md); a missing reward is refused or would be counted as 0.
ONE_ROW = {"osmosis", "trl", "verl", "verl_dataproto", "skyrl", "openrlhf", "openrlhf_experience"}
REWARDS = {
    "optional": {"sequences", "steps", "nodes", "trl_async", "verl", "tinker", "prime_rl", "verifiers", *CONVERSATIONS},
    "uniform": {"trl", "verl_dataproto"},  # a batch has the rewards of all rows, or none
}


def test_each_format_has_a_unique_name():
    assert len(_ALL) == len(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_exporting_twice_returns_the_same_rows(name):
    """In any order of steps, and after gather()."""
    form = FORMATS[name]
    first, again = (form.rows(worked.FACTS, worked.STEPS, Options(), LENGTHS) for _ in range(2))
    gathered = deepcopy(form.gather([first, first]))

    assert gathered == form.gather([first, again])
    assert first == again == form.rows(worked.FACTS, worked.STEPS[::-1], Options(), LENGTHS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rollout_without_exact_steps_has_no_rows(name):
    """It needs no other field of the format for that."""
    bare = replace(worked.FACTS, reward=None, advantages=None, metadata={})
    found = FORMATS[name].rows(bare, [make_step("a", [1], [10], problems=("echo",))], Options())

    assert (found.rows, found.skipped) == ([], [{"step_id": "a", "why": "echo"}])
    assert not FORMATS[name].gather([found, found])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("sequences", "steps", "verifiers")])
def test_a_fill_replaces_the_formats_own_logprob_of_tokens_that_were_not_sampled(name):
    """Sampled logprobs are not changed."""
    plain, filled = (
        worked.rows(name, fill=replace(LENGTHS, prompt_logprob=value)) for value in (PLAIN.prompt_logprob, 0.75)
    )

    assert sampled_logprobs(plain) == sampled_logprobs(filled)
    assert plain == [with_fill(row, 0.75, 1.0 if name in ("nodes", "scored_data") else 0.0) for row in filled]


def sampled_logprobs(rows):
    return [value for value in flat(rows) if value in (*worked.L1, *worked.L2)]


def flat(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list) else [value]


def with_fill(value, fill, own):
    if isinstance(value, dict):
        return {key: with_fill(part, fill, own) for key, part in value.items()}
    if isinstance(value, list):
        return [with_fill(part, fill, own) for part in value]
    return own if value == fill else value


def test_rows_cannot_be_gathered_if_some_lack_a_field():
    form = FORMATS["trl"]
    members = [
        form.rows(facts, worked.STEPS, Options()) for facts in (worked.FACTS, replace(worked.FACTS, reward=None))
    ]

    with pytest.raises(
        Inexpressible, match=r"^Format 'trl' requires the same fields in all rows; some have no reward\.$"
    ):
        form.gather(members)


def test_a_skipped_step_is_reported_with_id_and_reason():
    assert skipped_rows([Skipped("a", "echo")]) == [{"step_id": "a", "why": "echo"}]


def test_a_skipped_step_is_reported_with_the_tokens_that_are_not_trained():
    assert skipped_rows([Skipped("a", "long", 3)]) == [{"step_id": "a", "why": "long", "dropped_tokens": 3}]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_requires_a_reward_if_its_trainer_does(name):
    """`uniform`: of all rollouts of a group or of none."""
    form = FORMATS[name]
    facts = replace(worked.FACTS, reward=None)
    expected = next((use for use, names in REWARDS.items() if name in names), "required")

    assert form.reward == expected
    if expected == "required":
        with pytest.raises(MissingReward, match="requires a reward") as missing:
            form.rows(facts, worked.STEPS, Options(), LENGTHS)
        assert missing.value.code == "no_reward"
        return
    members = [form.rows(given, worked.STEPS, Options(), LENGTHS) for given in (worked.FACTS, facts)]
    if expected == "uniform":
        with pytest.raises(Inexpressible, match="requires the same fields"):
            form.gather(members)
        members = members[1:]
    assert form.gather(members)


@pytest.mark.parametrize("name", ["tinker", "trl_async", "prime_rl"])
def test_a_missing_advantage_has_its_own_code(name):
    with pytest.raises(MissingAdvantage) as missing:
        worked.rows(name, facts=replace(worked.FACTS, advantages=None))

    assert missing.value.code == "no_advantage"


@pytest.mark.parametrize("name", FORMATS)
def test_a_forked_rollout_is_refused_by_formats_with_one_row_per_rollout(name):
    """And with branches=one by every format that joins steps; the message has the number of rows and a remedy."""
    refusing = [branches for branches in ("all", "one", "longest", "last") if is_refused(name, branches)]

    assert ("one" if name in ONE_ROW else "all") == FORMATS[name].branches
    assert (["all", "one"] if name in ONE_ROW else [] if name in ("steps", *CONVERSATIONS) else ["one"]) == refusing


def is_refused(name, branches):
    try:
        assert worked.rows(name, FORK, options=Options(branches=branches), fill=LENGTHS)
    except Forked as forked:
        assert forked.code == "forked"
        assert "2 sequences" in str(forked)
        assert "branches=longest" in str(forked)
        return True
    return False


def reward_of(row):
    """Return the sum of the rewards of a row; None if the format has no rewards."""
    if isinstance(row, list):
        return None
    for name in ("reward", "scores", "episode_reward", "rewards", "reward_score", "rm_scores"):
        if name in row:
            return fsum(flat([row[name]]))
    return None


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - CONVERSATIONS.keys()))
def test_split_rewards_of_a_rollouts_rows_add_up_to_its_reward(name):
    """By default each row has the whole reward; a format that has it in one row only is not divided."""
    options = Options(branches="longest" if name in ONE_ROW else "all")
    full, split = (
        [reward_of(row) for row in worked.rows(name, FORK, options=replace(options, row_weight=weight), fill=LENGTHS)]
        for weight in ("full", "split")
    )
    rows = 1 if name in ONE_ROW else 2

    assert rows == len(full) == len(split)
    if full[0] is not None:
        assert full == [0.0, 1.0] if name == "skyrl_stepwise" else [1.0] * rows == full
        assert fsum(split) == 1.0


@pytest.mark.parametrize(("name", "field"), [("trl_async", "advantage"), ("tinker", "advantages")])
def test_split_advantages_are_divided(name, field):
    options = Options(row_weight="split")

    assert [max(flat([row[field]])) for row in worked.rows(name, FORK, options=options)] == [0.25, 0.25]


TYPES = {
    "text": str,
    "bool": bool,
    "int8": int,
    "int32": int,
    "int64": int,
    "float32": int | float,
    "float64": int | float,
    "json": object,
}


def fits(value, column):
    """Return whether a value has a column's type; null has every type."""
    if value is None:
        return True
    if isinstance(column, list):
        return isinstance(value, list) and all(fits(item, column[0]) for item in value)
    if isinstance(column, dict):
        return value.keys() <= column.keys() and all(fits(item, column[key]) for key, item in value.items())
    return isinstance(value, TYPES[column])


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_of_a_row_has_a_column_of_its_type(name):
    columns = FORMATS[name].columns
    for row in worked.rows(name, fill=Fill(prompt_length=4, response_length=10)):
        named = row if isinstance(row, dict) else dict(zip(columns, row, strict=True))

        assert fits(named, dict(columns))
