"""Sampled tokens, and the colours of their logprobs."""

import pytest

from proxy.cli.render.step import colored, ids_line, legend, recorded_texts


def step(response, ids=(1, 2)) -> dict:
    return {"response": response, "choices": [{"index": 1, "ids": list(ids)}]}


CHAT = {"content": [{"token": "a"}, {"token": "b"}]}
COMPLETION = {"tokens": ["a", "b"]}


@pytest.mark.parametrize("logprobs", [CHAT, COMPLETION])
def test_texts_are_those_that_the_answer_told_of_the_same_choice(logprobs):
    """In either shape."""
    response = {"choices": [{"index": 0, "logprobs": None}, {"index": 1, "logprobs": logprobs}]}

    assert ["a", "b"] == recorded_texts(step(response), 0)


@pytest.mark.parametrize(
    "response",
    [None, "cut", {}, {"choices": None}, {"choices": [{"index": 1, "logprobs": None}]}, {"choices": [{"index": 0}]}],
)
def test_where_none_were_told_there_are_none(response):
    """Engines answer what they like."""
    assert recorded_texts(step(response), 0) is None


def test_texts_of_another_number_than_ids_are_none():
    """They could not be told apart; nor are ids texts that stand in their place."""
    response = {"choices": [{"index": 1, "logprobs": COMPLETION}]}
    renamed = {"choices": [{"index": 1, "logprobs": {"tokens": ["a", "token_id:2"]}}]}

    assert recorded_texts(step(response, ids=[1, 2, 3]), 0) is None
    assert recorded_texts(step(renamed), 0) is None


def test_each_logprob_has_a_colour_of_its_range():
    """The likely ones in blue, the unlikely ones in orange and underlined; what has no logprob in neither."""
    line = colored(None, [1, 2, 3, 4, 5, 6, 7], [-0.01, -0.5, -2.0, -4.0, -9.0, None], with_values=False)
    styles = [str(span.style) for span in line.spans]

    assert "1 2 3 4 5 6 7 " == line.plain
    assert [
        "blue",
        "cyan",
        "default",
        "dark_orange",
        "bold underline dark_orange",
        "dim italic",
        "dim italic",
    ] == styles
    assert all(style in {str(span.style) for span in legend().spans} for style in styles)


def test_without_colours_logprobs_are_said():
    """Beside each token; texts are made visible, and where one is not known its id stands."""
    line = colored(["a\x1b", None], [7, 8], [-0.125, None], with_values=True)

    assert "a\\x1b(-0.125) 8(none) " == line.plain


def test_ids_stand_one_behind_the_other():
    """With a style for all."""
    assert "1 2 3" == ids_line([1, 2, 3], "dim").plain
