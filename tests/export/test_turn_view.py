"""Turns as rows: which there are, and what is too long."""

from array import array

import pytest
import worked
from forests import make_choice, make_step, rollouts
from hypothesis import given

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options, sequences

NAMES = ["verifiers", "training_examples", "marin", "skyrl_stepwise"]


@given(rollouts())
def test_once_each(steps):
    """What canonical rows train is trained turn by turn, each token once, the oldest turn first."""
    rows = worked.rows("training_examples", steps)
    trained = sorted(tokens for row in rows for tokens in pairs(row["token_ids"], row["mask"], row["logprobs"]))
    canonical = sequences(steps, worked.FACTS).rows

    assert trained == sorted(tokens for row in canonical for tokens in pairs(row.token_ids, row.mask, row.logprobs))


def pairs(ids, mask, logprobs):
    return [(token, logprob) for token, mark, logprob in zip(ids, mask, logprobs, strict=True) if mark]


@pytest.mark.parametrize("name", ["marin", "skyrl_stepwise"])
def test_too_long(name):
    """Where a trainer knows no cut, a turn that is too long is left out and told."""
    found = FORMATS[name].rows(worked.FACTS, worked.STEPS, Options(max_len=11))

    assert (1, [{"step_id": "b", "why": "longer than max_len=11"}]) == (len(found.rows), found.skipped)


@pytest.mark.parametrize("name", NAMES)
def test_retokenized(name):
    """What was made of text has no logprobs, and none are made up."""
    step = make_step("a", [1], make_choice(0, [10]), problems=("retokenized",))

    with pytest.raises(
        Inexpressible, match="requires the logprob of each sampled token; rollout .* has none for step 'a'"
    ):
        worked.rows(name, [step], options=Options(include="retokenized"))


@pytest.mark.parametrize("name", NAMES)
def test_unlogged(name):
    """Logprobs that nobody asked for are not made up either; the refusal names the setting."""
    step = make_step("a", [1], make_choice(0, [10], logprobs=array("f")))

    with pytest.raises(Inexpressible, match=r"has none for step 'a'.*record\.logprobs: off"):
        worked.rows(name, [step])


@pytest.mark.parametrize("name", NAMES)
def test_empty(name):
    """A rollout without steps has no rows, and needs no reward for that."""
    assert [] == worked.rows(name, [])
