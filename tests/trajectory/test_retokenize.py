"""Retokenizing: ids made from text, said to be so, and never where the engine gave ids."""

from array import array
from math import isnan

import pytest
from forests import make_step
from recorded import load, plan_of, play

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.retokenize import retokenize
from proxy.trajectory.sequence import Options, sequences

FACTS = RolloutFacts("r1", None, "open", None, {}, None, {})
OPEN, CLOSE = 1, 2


class Letters:
    """A tokenizer whose tokens are letters; `forgets` is a template that spells a reply otherwise in history."""

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


def told(name: str = "chat_plain", **body):
    cassette = load(name)
    return play(plan_of(cassette.path, cassette.body | body, kind="plain"), cassette)[2]


def test_a_reply_is_what_the_template_adds_for_it():
    """With the token that closes it; no logprob is made up."""
    step = told()
    made = retokenize(step, Letters())

    text = step.response["choices"][0]["message"]["content"]
    assert [*map(ord, text), CLOSE] == made.choices[0].ids.tolist()
    assert made.prompts[0].tolist() == Letters().render(step.request["messages"], None, reply=True)
    assert all(map(isnan, made.choices[0].logprobs))
    assert ("no_token_ids", "retokenized") == made.problems


def test_where_the_template_spells_history_anew_the_text_alone_is_the_reply():
    """The prompt stays what it was."""
    step = told()

    assert (
        ord(step.response["choices"][0]["message"]["content"][-1])
        == retokenize(step, Letters(forgets=True)).choices[0].ids[-1]
    )


def test_completions_are_told_by_their_texts():
    """Of a text, or of ids that the client gave."""
    made = retokenize(told("cmpl_plain"), Letters())
    ids = retokenize(told("cmpl_plain", prompt=[7, 8]), Letters())

    assert made.prompts[0].tolist() == [*map(ord, load("cmpl_plain").body["prompt"])]
    assert [7, 8] == ids.prompts[0].tolist()


@pytest.mark.parametrize(
    ("step", "tokenizer"),
    [
        (make_step("1", [1], [2]), Letters()),  # it has ids
        (told("err_temp"), Letters()),
        (told("cmpl_plain", prompt=["a", "b"]), Letters()),
        (told("cmpl_plain", prompt=[-(2**40)]), Letters()),
        (told(), Letters(refuses=True)),
    ],
    ids=["exact", "error", "several prompts", "no id", "refused"],
)
def test_what_has_ids_or_cannot_be_told_stays_as_it_is(step, tokenizer):
    """Ids that an engine gave are never made again."""
    assert step is retokenize(step, tokenizer)


@pytest.mark.parametrize("include", ["exact", "flagged"])
def test_retokenized_rows_come_only_where_they_are_asked_for_by_name(include):
    """Flagged is not enough."""
    assert () == sequences([retokenize(told(), Letters())], FACTS, Options(include=include)).rows


def test_every_retokenized_row_says_so_and_has_no_logprobs():
    """Its tokens are masked as a reply, and all of its logprobs are null."""
    (row,) = sequences([retokenize(told(), Letters())], FACTS, Options(include="retokenized")).rows

    assert "retokenized" in row.problems
    assert {None} == set(row.logprobs)
    assert 1 in row.mask
    assert len(row.token_ids) == len(row.mask) == len(row.logprobs)


def test_exact_steps_beside_them_stay_what_they_are():
    """A rollout may have both."""
    exact = make_step("T2", [9], [10])
    rows = sequences([retokenize(told(), Letters()), exact], FACTS, Options(include="retokenized")).rows

    assert [True, False] == ["retokenized" in row.problems for row in rows]
    assert array("f", exact.choices[0].logprobs).tolist() == rows[1].logprobs[1:]
