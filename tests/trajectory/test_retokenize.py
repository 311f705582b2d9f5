"""Retokenizing: token ids made from text, flagged as such, and never for a step with ids of the engine."""

from array import array
from math import isnan

import pytest
from tests.support.forests import make_step
from tests.support.recorded import load, plan_of, play

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.retokenize import retokenize
from proxy.trajectory.sequence import Options, sequences

FACTS = RolloutFacts("r1", None, "open", None, {}, None, {})
OPEN, CLOSE = 1, 2


class Letters:
    """A tokenizer with letters as tokens; with `forgets`, its template renders replies in the history differently."""

    def __init__(self, *, forgets: bool = False, refuses: bool = False) -> None:
        self.forgets, self.refuses = forgets, refuses

    def render(self, messages, tools, *, reply):
        if self.refuses:
            raise ValueError("roles must alternate")
        ids = [token for message in messages for token in self._message(message)]
        return [*ids, OPEN, ord("a")] if reply else ids

    def _message(self, message):
        role = ord("A" if self.forgets and message["role"] == "assistant" else message["role"][0])
        return [OPEN, role, *self.encode(message.get("content") or ""), CLOSE]

    def encode(self, text):
        return [ord(letter) for letter in text]


def recorded_step(name: str = "chat_plain", **body):
    cassette = load(name)
    return play(plan_of(cassette.path, cassette.body | body, kind="plain"), cassette)[2]


def test_a_reply_is_tokenized_as_the_template_renders_it():
    """With the token that ends it; all logprobs are NaN."""
    step = recorded_step()
    made = retokenize(step, Letters())

    text = step.response["choices"][0]["message"]["content"]
    assert [*map(ord, text), CLOSE] == made.choices[0].ids.tolist()
    assert made.prompts[0].tolist() == Letters().render(step.request["messages"], None, reply=True)
    assert all(map(isnan, made.choices[0].logprobs))
    assert made.problems == ("no_token_ids", "retokenized")


def test_a_reply_that_the_template_renders_differently_in_history_is_tokenized_from_its_text():
    step = recorded_step()

    assert (
        ord(step.response["choices"][0]["message"]["content"][-1])
        == retokenize(step, Letters(forgets=True)).choices[0].ids[-1]
    )


def test_completions_are_tokenized_from_prompt_and_text():
    """A prompt of token ids is kept."""
    made = retokenize(recorded_step("cmpl_plain"), Letters())
    ids = retokenize(recorded_step("cmpl_plain", prompt=[7, 8]), Letters())

    assert made.prompts[0].tolist() == [*map(ord, load("cmpl_plain").body["prompt"])]
    assert ids.prompts[0].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("step", "tokenizer"),
    [
        (make_step("1", [1], [2]), Letters()),  # it has ids
        (recorded_step("err_temp"), Letters()),
        (recorded_step("cmpl_plain", prompt=["a", "b"]), Letters()),
        (recorded_step("cmpl_plain", prompt=[-(2**40)]), Letters()),
        (recorded_step(), Letters(refuses=True)),
    ],
    ids=["exact", "error", "several prompts", "no id", "refused"],
)
def test_steps_with_ids_or_without_usable_text_are_returned_unchanged(step, tokenizer):
    assert step is retokenize(step, tokenizer)


@pytest.mark.parametrize("include", ["exact", "flagged"])
def test_retokenized_rows_are_exported_only_with_include_retokenized(include):
    assert sequences([retokenize(recorded_step(), Letters())], FACTS, Options(include=include)).rows == ()


def test_a_retokenized_row_is_flagged_and_has_null_logprobs():
    """The reply is in the mask."""
    (row,) = sequences([retokenize(recorded_step(), Letters())], FACTS, Options(include="retokenized")).rows

    assert "retokenized" in row.problems
    assert set(row.logprobs) == {None}
    assert 1 in row.mask
    assert len(row.token_ids) == len(row.mask) == len(row.logprobs)


def test_exact_steps_of_the_same_rollout_are_not_changed():
    exact = make_step("T2", [9], [10])
    rows = sequences([retokenize(recorded_step(), Letters()), exact], FACTS, Options(include="retokenized")).rows

    assert ["retokenized" in row.problems for row in rows] == [True, False]
    assert array("f", exact.choices[0].logprobs).tolist() == rows[1].logprobs[1:]
