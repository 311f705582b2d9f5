"""Reading an engine's JSON, the strict way first."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.jsontext import NotJson, read_json, write_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_what_is_written_is_read_again(value):
    """The pair write/read, strictly."""
    assert (value, False) == read_json(write_json(value, loosely=False))


def test_nan_and_infinities_are_read_and_written_as_python_spells_them():
    """No JSON, but engines in Python write it."""
    value, loosely = read_json(b'{"a":NaN,"b":-Infinity}')

    assert loosely
    assert math.isnan(value["a"])
    assert b'{"a":NaN,"b":-Infinity}' == write_json(value, loosely=True)


def test_a_lone_surrogate_becomes_a_question_mark():
    """So that the value can be written again."""
    assert ({"a": "?"}, True) == read_json(b'{"a":"\\ud800"}')


@pytest.mark.parametrize("text", [b"", b"{", b"<html>", b"\xff", b"[" * 100_000])
def test_what_is_no_json_has_one_name(text):
    """NotJson, whatever was wrong."""
    with pytest.raises(NotJson):
        read_json(text)
