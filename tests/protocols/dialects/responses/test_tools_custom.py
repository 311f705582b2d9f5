"""Freeform tools as functions of one string."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from responses_drawn import argument_text

from proxy.protocols.dialects.responses.tools import FreeformReader, arguments_for, input_from


@settings(max_examples=60)
@given(said=st.text(), spaced=st.booleans(), plain=st.booleans())
def test_an_input_is_read_out_of_any_spelling(said, spaced, plain):
    """The reader gives what a JSON reader gives."""
    assert said == input_from(argument_text(said, spaced=spaced, plain=plain))
    assert said == input_from(arguments_for(said))
    assert {"input": said} == json.loads(arguments_for(said))


@settings(max_examples=60)
@given(said=st.text(alphabet='ab"\\/u0d8é🙂\n{}:', max_size=90), start=st.booleans(), data=st.data())
@example(said="\\ud83d\\ude42", start=True, data=None)
def test_splits_make_no_difference(said, start, data):
    """Whatever the text is, pieces of it give the same input."""
    text = '{"input": "' + said if start else said
    places = [1, 12, 15, 18] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = FreeformReader()
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]

    assert input_from(text) == "".join(map(reader.feed, pieces)) + reader.end()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a"}, and more', "a"),
        ('{"input": "a", "b": 1}', "a"),
        ('{"input": "cut \\u00', "cut \\u00"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "\\x"}', "\\x"),
        ('{"input": "line\nline"}', "line\nline"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        (" " * 70 + '{"input": "a"}', " " * 70 + '{"input": "a"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("", ""),
    ],
)
def test_what_is_no_input_is_shown_as_it_stands(arguments, expected):
    """An agent sees what the model wrote, however badly."""
    assert expected == input_from(arguments)
