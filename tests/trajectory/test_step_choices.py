"""The choices of a recorded response, which may be any JSON."""

import pytest
from forests import make_step

from proxy.trajectory.step import answers_of, messages_of

CHOICE = {"index": 1, "text": "b"}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"choices": [CHOICE, {"text": "a"}]}, {1: CHOICE, 0: {"text": "a"}}),
        ({"choices": [CHOICE, {"index": 1, "text": "again"}]}, {1: CHOICE}),
        ({"choices": [5, None, {"index": [1]}, {"index": True}, {"index": "1"}, CHOICE]}, {1: CHOICE}),
        ({"choices": {"0": CHOICE}}, {}),
        ({"choices": 5}, {}),
        ({}, {}),
        (None, {}),
    ],
)
def test_choices_are_those_that_have_the_shape_of_one(response, expected):
    """By index; the first of each."""
    assert expected == answers_of(make_step("a", [1], [2], response=response))


@pytest.mark.parametrize(
    ("messages", "expected"), [([1, "a"], [1, "a"]), ({"a": 1}, []), ("hi", []), (None, []), (5, [])]
)
def test_messages_are_a_list(messages, expected):
    """What else an agent sent is none."""
    assert expected == messages_of(make_step("a", [1], [2], request={"messages": messages}))
