"""The choices of a recorded response, which may be any JSON."""

import pytest
from tests.support.forests import make_step

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
def test_malformed_choices_are_ignored(response, expected):
    """By index; of duplicates the first."""
    assert expected == answers_of(make_step("a", [1], [2], response=response))


@pytest.mark.parametrize(
    ("messages", "expected"), [([1, "a"], [1, "a"]), ({"a": 1}, []), ("hi", []), (None, []), (5, [])]
)
def test_messages_of_another_type_are_an_empty_list(messages, expected):
    assert expected == messages_of(make_step("a", [1], [2], request={"messages": messages}))
