"""Turns as rows."""

from array import array

import pytest
from hypothesis import given
from tests.support import worked
from tests.support.forests import make_choice, make_step, rollouts

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options, sequences

NAMES = ["verifiers", "training_examples", "marin", "skyrl_stepwise"]


@given(rollouts())
def test_each_token_of_the_canonical_rows_is_trained_once_turn_by_turn(steps):
    """The oldest turn first."""
    rows = worked.rows("training_examples", steps)
    trained = sorted(tokens for row in rows for tokens in pairs(row["token_ids"], row["mask"], row["logprobs"]))
    canonical = sequences(steps, worked.FACTS).rows

    assert trained == sorted(tokens for row in canonical for tokens in pairs(row.token_ids, row.mask, row.logprobs))


def pairs(ids, mask, logprobs):
    return [(token, logprob) for token, mark, logprob in zip(ids, mask, logprobs, strict=True) if mark]


@pytest.mark.parametrize("name", ["marin", "skyrl_stepwise"])
def test_a_turn_longer_than_max_len_is_skipped_and_reported(name):
    """If the trainer's format has no truncation."""
    found = FORMATS[name].rows(worked.FACTS, worked.STEPS, Options(max_len=11))

    assert (
        len(found.rows),
        found.skipped,
    ) == (1, [{"step_id": "b", "why": "longer than max_len=11", "dropped_tokens": 2}])


@pytest.mark.parametrize("name", NAMES)
def test_retokenized_steps_are_rejected_without_logprobs(name):
    step = make_step("a", [1], make_choice(0, [10]), problems=("retokenized",))

    with pytest.raises(
        Inexpressible, match="requires the logprob of each sampled token; rollout .* has none for step 'a'"
    ):
        worked.rows(name, [step], options=Options(include="retokenized"))


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_requested_logprobs_are_rejected_with_the_name_of_the_setting(name):
    step = make_step("a", [1], make_choice(0, [10], logprobs=array("f")))

    with pytest.raises(Inexpressible, match=r"has none for step 'a'.*record\.logprobs: off"):
        worked.rows(name, [step])


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_without_steps_has_no_rows_and_needs_no_reward(name):
    assert worked.rows(name, []) == []
