"""Sampled tokens become text, and something ends them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.distribution import load_distribution, prefix_of
from proxy.simulator.generation import Limits, Token, generate
from proxy.simulator.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
END, SECOND_END = TOKENIZER.id("<|im_end|>"), TOKENIZER.id("<|endoftext|>")
TEXT = "Return the current file. It is a list of objects"


def generated(text: str, alternatives: int = 0, **limits) -> list[Token]:
    ids = TOKENIZER.encode(text)
    odds = load_distribution().odds(prefix_of([]))
    limits = {"max_tokens": len(ids), "ends": (END, SECOND_END), **limits}
    return list(generate([(token, odds) for token in ids], TOKENIZER, Limits(**limits), alternatives))


def shown(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def last(tokens: list[Token]) -> tuple[str | None, int | str | None]:
    return tokens[-1].finish_reason, tokens[-1].stop_reason


def test_the_length_ends_it():
    """At the greatest length a choice ends with the reason length."""
    tokens = generated(TEXT, max_tokens=3)

    assert len(tokens) == 3
    assert last(tokens) == ("length", None)


def test_the_end_of_the_turn_is_sampled_and_not_shown():
    """The end token is among the ids, but not in the text."""
    tokens = generated("It is<|im_end|>", max_tokens=9)

    assert [*TOKENIZER.encode("It is"), END] == [token.id for token in tokens]
    assert shown(tokens) == "It is"
    assert last(tokens) == ("stop", None)


def test_the_end_of_the_turn_goes_before_the_length():
    """An end token at the greatest length ends with the reason stop."""
    assert last(generated("It<|im_end|>")) == ("stop", None)


def test_a_second_end_token_is_named():
    """Another end token of the model is told as the stop reason."""
    assert last(generated("It<|endoftext|>")) == ("stop", SECOND_END)


def test_a_stop_token_ends_it():
    """A stop token is among the ids, its text is not shown, and it is the stop reason."""
    stop = TOKENIZER.encode(" file")[0]
    tokens = generated(TEXT, stop_ids=frozenset([stop]))

    assert shown(tokens) == "Return the current"
    assert stop == tokens[-1].id
    assert ("stop", stop) == last(tokens)


def test_a_stop_token_is_shown_if_asked():
    """With include_stop_str_in_output the text of a stop token is shown."""
    stop = frozenset(TOKENIZER.encode(" file"))

    assert shown(generated(TEXT, stop_ids=stop, show_stop=True)) == "Return the current file"


def test_nothing_stops_before_the_least_length():
    """Before min_tokens neither end tokens nor stop tokens nor stop strings end a choice."""
    tokens = generated("It<|im_end|> is", min_tokens=3, stops=("t",), max_tokens=3)

    assert last(tokens) == ("length", None)


def test_a_stop_string_cuts_the_text_and_no_ids():
    """A stop string ends a choice: the text is cut before it, all sampled ids stay."""
    tokens = generated(TEXT, stops=("nowhere", "le. I"))

    assert shown(tokens) == "Return the current fi"
    assert TOKENIZER.encode("Return the current file. I") == [token.id for token in tokens]
    assert last(tokens) == ("stop", "le. I")


def test_a_stop_string_is_shown_if_asked():
    """With include_stop_str_in_output the text is cut behind the stop string."""
    assert shown(generated(TEXT, stops=("le. I",), show_stop=True)) == "Return the current file. I"


def test_text_is_held_back_for_stop_strings():
    """So much of the text is held back as may be the beginning of the longest stop string."""
    tokens = generated("Return the", stops=("xyz",))

    assert [token.text for token in tokens] == ["Retu", "rn the"]


@given(st.lists(st.sampled_from([" the", "le", ".", " I", "t", "\u00e9", "zz"]), min_size=1), st.integers(1, 5))
def test_what_is_shown_is_the_text(pieces, size):
    """Whatever is held back on the way, at the end exactly the text up to the stop string was shown."""
    text = "".join(pieces)
    stop = "le. It"[:size]

    assert text.partition(stop)[0] == shown(generated(text, stops=(stop,)))


@pytest.mark.parametrize("count", [1, 4])
def test_alternatives_follow_the_token(count):
    """The scores are the token itself, then the most likely ones, each once."""
    scores = generated("It", count)[0].scores

    assert scores[0][0] == "It"
    assert len(scores) == len(set(scores))
    assert count <= len(scores) <= count + 1


def test_only_the_token_is_scored_otherwise():
    """Without alternatives there is one score."""
    assert [len(token.scores) for token in generated("It")] == [1]
