"""Properties of all formats."""

from copy import deepcopy
from dataclasses import replace

import pytest
import worked
from forests import make_step

from proxy.export import _ALL, FORMATS, Fill, Inexpressible
from proxy.export.base import PLAIN, skipped_rows
from proxy.trajectory.sequence import Options, Skipped

LENGTHS = Fill(prompt_length=4, response_length=10)


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

    assert ([], [{"step_id": "a", "why": "echo"}]) == (found.rows, found.skipped)
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


def test_rows_of_which_some_lack_a_field_cannot_be_gathered():
    form = FORMATS["trl"]
    members = [
        form.rows(facts, worked.STEPS, Options()) for facts in (worked.FACTS, replace(worked.FACTS, reward=None))
    ]

    with pytest.raises(
        Inexpressible, match=r"^Format 'trl' requires the same fields in all rows; some have no reward\.$"
    ):
        form.gather(members)


def test_a_skipped_step_is_reported_with_id_and_reason():
    assert [{"step_id": "a", "why": "echo"}] == skipped_rows([Skipped("a", "echo")])
