"""Rows of playbacks in every format: the example of all formats, with its first turn inherited."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import worked
from tests.support.forests import make_step, unique_forests
from tests.support.playbacks import families, inherit
from tests.support.reading_rows import BACK, CONVERSATIONS, TURNS, trained_ids

from proxy.export import FORMATS, Fill, Inexpressible
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import BranchPoint, Options

STEPS = [inherit(worked.first(rollout_id="r0"), "r1"), worked.second()]
FILL = Fill(prompt_length=16, response_length=16)
PROMPTS = {  # of formats with a prompt and a response
    "trl": lambda row: row["prompt_ids"][0],
    "verl": lambda row: row["prompt_ids"],
    "verl_dataproto": lambda row: row["prompts"][0][-row["attention_mask"][0][:16].count(1) :],
    "osmosis": lambda row: row["prompt_ids"],
    "slime": lambda row: row["tokens"][: -row["response_length"]],
    "skyrl": lambda row: row["prompt_token_ids"][0],
    "sequences": lambda row: row["token_ids"][: row["prompt_len"]],
    "steps": lambda row: row["prompt_ids"],
    "verifiers": lambda row: row["tokens"]["prompt_ids"],
    "training_examples": lambda row: row["token_ids"][: row["mask"].index(1)],
    "marin": lambda row: row["prompt_tokens"],
    "skyrl_stepwise": lambda row: row["prompt_token_ids"][0],
}
WHOLE = [*worked.P, *worked.S1, *worked.T]  # the prompt of the first live token


def rows(name, mode, steps=STEPS, facts=worked.FACTS):
    return worked.rows(name, steps, facts, Options(inherited=mode), FILL)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ["prompt", "masked"])
def test_the_live_tokens_are_trained_and_no_inherited_ones(name, mode):
    (row,) = rows(name, mode)

    assert trained_ids(name, row) == worked.S2
    if name in BACK:
        ids, mask, _ = BACK[name](row)
        assert ([*WHOLE, *worked.S2], [0] * len(WHOLE) + [1] * len(worked.S2)) == (ids, mask)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_row_begins_with_the_prompt_of_its_first_live_token_or_masked_with_the_first_prompt(name):
    """A row of one turn has the prompt of this turn."""
    assert [WHOLE, WHOLE if name in TURNS else worked.P] == [
        PROMPTS[name](*rows(name, mode)) for mode in ("prompt", "masked")
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_with_trained_the_rows_are_those_of_the_steps_as_if_they_were_live(name):
    """Where a row names what it inherited, it still does."""
    found, expected = rows(name, "trained"), rows(name, "prompt", [worked.first(), worked.second()])
    for row in found if name in ("sequences", "steps") else ():
        row.pop("inherited", None)

    assert found == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_rollout_that_inherited_all_of_its_steps_has_no_rows(name):
    """Nor has it one for a step without ids; its steps are skipped with the reason."""
    without_ids = replace(inherit(worked.second(rollout_id="r0"), "r1"), prompts=(), choices=())
    for mode in ("prompt", "masked"):
        found = FORMATS[name].rows(worked.FACTS, STEPS[:1], Options(inherited=mode), FILL)
        other = FORMATS[name].rows(worked.FACTS, [*STEPS[:1], without_ids], Options(inherited=mode), FILL)

        assert (found.rows, found.skipped) == ([], [{"step_id": "a", "why": "inherited"}])
        assert (other.rows, other.skipped[0]["why"]) == ([], "inherited")


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - CONVERSATIONS.keys() - {"steps"}))
@pytest.mark.parametrize("mode", ["prompt", "masked", "trained"])
def test_each_row_has_the_point_where_it_leaves_what_its_rollout_inherited(name, mode):
    found = FORMATS[name].rows(worked.FACTS, STEPS, Options(inherited=mode), FILL)

    assert {BranchPoint("r0", "a", 3)} == {*found.points}
    assert len(found.rows) == len(found.points)


def test_a_row_of_one_step_names_the_step_from_which_it_is_inherited():
    live, inherited = rows("steps", "trained")[::-1]

    assert (inherited["inherited"], live.get("inherited")) == ({"rollout_id": "r0", "step_id": "a"}, None)


@pytest.mark.parametrize("mode", ["prompt", "masked"])
def test_policy_versions_are_those_of_live_tokens(mode):
    """The inherited turn is of version 3, the live one of version 4."""
    versions = {
        "verl": lambda row: row["extra_fields"],
        "trl_async": lambda row: (row["model_version"], row["metrics"]["model_version_spread"]),
        "areal": lambda row: row["versions"][0],
        "slime": lambda row: row["weight_versions"],
        "marin": lambda row: row["metadata"]["weight_step"],
    }
    expected = {
        "verl": {"rollout_id": "r1", "min_global_steps": 4, "max_global_steps": 4},
        "trl_async": (4, 0.0),
        "areal": [-1] * len(WHOLE) + [4, 4],
        "slime": ["4"],
        "marin": 4,
    }

    assert {name: read(*rows(name, mode)) for name, read in versions.items()} == expected


@pytest.mark.parametrize("inherited", [None, "main", "3"])
def test_the_version_of_what_was_inherited_does_not_matter(inherited):
    """Neither if it is unknown, nor if it is the only known one."""
    steps = [inherit(worked.first(rollout_id="r0", policy_version=inherited), "r1")]
    for mode in ("prompt", "masked"):
        known = [rows(name, mode, [*steps, worked.second()])[0] for name in ("verl", "slime")]
        unknown = [rows(name, mode, [*steps, worked.second(policy_version=None)])[0] for name in ("verl", "slime")]

        assert (
            known[0]["extra_fields"], known[1]["weight_versions"]
        ) == ({"rollout_id": "r1", "min_global_steps": 4, "max_global_steps": 4}, ["4"])  # fmt: skip
        assert (unknown[0]["extra_fields"], unknown[1]["weight_versions"]) == ({"rollout_id": "r1"}, [])


@pytest.mark.parametrize("mode", ["prompt", "masked"])
def test_rewards_of_tokens_are_at_live_tokens(mode):
    """A reward of an inherited step is at none; without a reward of the last live step, the rollout's is at its last token."""
    own = {"rm_scores": lambda row: row["rm_scores"][0], "rewards": lambda row: row["rewards"][0]}
    facts = replace(worked.FACTS, step_rewards={"a": 7.0})
    for name, read in (("verl_dataproto", own["rm_scores"]), ("skyrl", own["rewards"])):
        rewards = [reward for reward in read(*rows(name, mode, facts=facts)) if reward]
        assert (rewards, read(*rows(name, mode, facts=facts))[0]) == ([1.0], 0.0)
    bare = replace(worked.FACTS, reward=None, step_rewards={"a": 7.0})

    assert "rm_scores" not in rows("verl_dataproto", mode, facts=bare)[0]


@pytest.mark.parametrize("mode", ["prompt", "masked"])
def test_the_actions_of_openrlhf_are_live(mode):
    agent, experience = rows("openrlhf", mode)[0], rows("openrlhf_experience", mode)[0]

    assert agent["action_ranges"] == [[10, 12]]
    assert (experience["response_length"], experience["action_mask"][0]) == ([2], [0] * 9 + [1, 1])


def test_inherited_replies_are_copied_context_of_a_trajectory():
    """They have no metrics, which consumers train."""
    for mode in ("prompt", "masked"):
        (document,) = rows("atif", mode)
        agent = [step for step in document["steps"] if step["source"] == "agent"]

        assert [("is_copied_context" in step, "metrics" in step) for step in agent] == [(True, False), (False, True)]
        assert document["final_metrics"]["total_completion_tokens"] == 2


@given(families(unique_forests(), repeats=False), st.sampled_from(["prompt", "masked"]))
def test_no_format_trains_a_token_of_a_source_and_its_playbacks_twice(family, mode):
    """Every sampled id is unique; a format that refuses a rollout has no rows of it."""
    facts = {name: replace(worked.FACTS, rollout_id=name) for name in family}
    played = {
        name: [replace(step, policy_version="1", response={"choices": []}, request={"messages": []}) for step in steps]
        for name, steps in family.items()
    }
    for name, form in FORMATS.items():
        options = Options(inherited=mode, branches="longest" if form.branches == "one" else "all")
        trained = Counter()
        for rollout_id, steps in played.items():
            with suppress(Inexpressible):
                found = form.rows(facts[rollout_id], steps, options, Fill(prompt_length=999, response_length=999))
                trained.update(token for row in found.rows for token in trained_ids(name, row))
                live = [step for step in steps if step.inherited is None]
                sampled = {token for step in live for choice in step.choices for token in choice.ids}
                inherited = {step.step_id for step in steps if step.inherited is not None}

                assert {token for row in found.rows for token in trained_ids(name, row)} <= sampled
                assert not inherited.intersection(step_id for step_ids in found.trained for step_id in step_ids)
        assert {*trained.values()} <= {1}


def test_a_row_without_a_point_is_not_of_a_playback():
    found = FORMATS["sequences"].rows(RolloutFacts("r1"), [make_step("a", [1], [10])], Options())

    assert [*found.points] == [None]
    assert "inherited" not in found.rows[0]
