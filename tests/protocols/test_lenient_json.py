"""Engines' JSON is read strictly first, then as Python's json module reads it."""

import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.lenient_json import NotJson, read_json, write_loosely

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_written_json_reads_back_as_the_same_value(value):
    assert read_json(orjson.dumps(value)) == read_json(write_loosely(value)) == (value, False)


def test_nan_and_infinities_are_read_and_written_as_python_writes_them():
    """They are not JSON, but engines in Python send them."""
    value, loosely = read_json(b'{"a":NaN,"b":-Infinity}')

    assert loosely
    assert math.isnan(value["a"])
    assert write_loosely(value) == b'{"a":NaN,"b":-Infinity}'


@pytest.mark.parametrize("literal", [b"1e400", b"-1e400", b"9" * 5000, b"1.5E+999"])
def test_a_number_beyond_a_double_is_written_unchanged(literal):
    """`Infinity` would be invalid JSON; the value is read as a string, which no reader takes for a number."""
    text = b'{"a":[' + literal + b',1.5,7],"b":"\xee\x80\x80overflow:x"}'
    value, loosely = read_json(text)

    assert (loosely, type(value["a"][0]), value["a"][1:]) == (True, str, [1.5, 7])
    assert text == write_loosely(value)


def test_a_lone_surrogate_becomes_a_question_mark():
    """Without it, the value could not be written as UTF-8."""
    assert read_json(b'{"a":"\\ud800"}') == ({"a": "?"}, True)


@pytest.mark.parametrize("text", [b"", b"{", b"<html>", b"\xff", b"[" * 100_000])
def test_invalid_json_raises_not_json(text):
    with pytest.raises(NotJson):
        read_json(text)
