"""Custom tools as functions of one string."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.responses_drawn import argument_text

from proxy.protocols.dialects.responses.tools import FreeformReader, arguments_for, input_from


@settings(max_examples=60)
@given(value=st.text(), spaced=st.booleans(), plain=st.booleans())
def test_the_input_is_read_from_any_json_escaping(value, spaced, plain):
    """The reader agrees with Python's json module."""
    assert value == input_from(argument_text(value, spaced=spaced, plain=plain))
    assert value == input_from(arguments_for(value))
    assert {"input": value} == json.loads(arguments_for(value))


@settings(max_examples=60)
@given(value=st.text(alphabet='ab"\\/u0d8é🙂\n{}:', max_size=90), start=st.booleans(), data=st.data())
@example(value="\\ud83d\\ude42", start=True, data=None)
def test_the_input_does_not_depend_on_the_chunking(value, start, data):
    text = '{"input": "' + value if start else value
    cuts = [1, 12, 15, 18] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = FreeformReader()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

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
def test_arguments_without_an_input_are_returned_as_they_are(arguments, expected):
    """The agent sees the model's output."""
    assert expected == input_from(arguments)
