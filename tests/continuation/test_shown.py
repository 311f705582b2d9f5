"""The parts of a reply that a rendered turn contains."""

import pytest
from turns import assistant, tool_call

from proxy.continuation.shown import comparable, what_is_missing


@pytest.mark.parametrize(
    ("reply", "shown", "missing"),
    [
        (assistant("Yes"), "Yes<end>", None),
        (assistant(" Yes \n"), "<a>Yes<end>", None),
        (assistant("Yes"), "<end>", "content_stripped"),
        (assistant("Yes", reasoning="Hm"), "Yes<end>", "reasoning_stripped"),
        (assistant("Yes", reasoning="Hm"), "<think>\nHm\n</think>Yes<end>", None),
        (assistant("<think>Hm</think>Yes"), "Yes<end>", "reasoning_stripped"),
        (assistant("<think>\n\n</think>Yes"), "Yes<end>", None),
        (assistant("Hm</think>Yes"), "Yes<end>", "reasoning_stripped"),
        (assistant("<think>a</think><think>b</think>Yes"), "<think>a</think><think>b</think>Yes<end>", None),
        (assistant("<think>a</think><think>b</think>Yes"), "<think>a</think>Yes<end>", "reasoning_stripped"),
        (assistant("<think>a</think><think>a</think>Yes"), "<think>a</think>Yes<end>", None),
        (
            assistant("<think>a</think><think>b</think>Yes"),
            "<think>b</think><think>a</think>Yes<end>",
            "reasoning_stripped",
        ),
        (assistant("<think>a<think>b</think>Yes"), "<think>b</think>Yes<end>", "reasoning_stripped"),
        (assistant("<think>Yes"), "<think>Yes<end>", None),
        (assistant(None, tool_calls=[tool_call("{}")] * 2), "<call>add</call><call>add</call>", None),
        (assistant(None, tool_calls=[tool_call("{}")] * 2), "<call>add</call>", "tool_calls_stripped"),
        (assistant(None, tool_calls=[tool_call("{}"), tool_call("{}", "sub")]), "sub add", "tool_calls_stripped"),
    ],
)
def test_a_missing_part_is_named(reply, shown, missing):
    """Whitespace and empty thoughts are no parts."""
    assert missing == what_is_missing(reply, shown)


def test_texts_are_compared_without_whitespace_and_empty_thoughts():
    """Templates add and drop both."""
    assert comparable("<think>\n\n</think>\n\nYes sir") == comparable("Yes  sir\n")
    assert comparable("<think>Hm</think>Yes") != comparable("Yes")
