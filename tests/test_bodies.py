"""Reading what clients send."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.bodies import MAX_DEPTH, read_body
from proxy.errors import BadCall


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_bytes_are_read_or_refused_and_nothing_else(text):
    """Only BadCall escapes, and it says something."""
    try:
        assert isinstance(read_body(text), dict)
    except BadCall as error:
        assert error.message


@given(
    st.dictionaries(
        st.text(max_size=5), st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30)
    )
)
def test_a_body_that_is_taken_is_carried_unchanged(body):
    """Numbers too: what 64 bits cannot carry is refused, not changed."""
    text = json.dumps(body).encode()
    if any(type(value) is int and not -(2**63) <= value < 2**64 for value in body.values()):
        with pytest.raises(BadCall, match="64 bits"):
            read_body(text)
    else:
        assert body == read_body(text)


def test_digits_within_strings_are_no_integers():
    """Nor are large floats."""
    assert {"a": "1" * 30, "b": 1e30, "c": 2e25} == read_body(b'{"a": "' + b"1" * 30 + b'", "b": 1e30, "c": 2e+25}')


def test_nesting_has_a_bound_below_what_can_be_written():
    """So that no body that is taken fails later."""
    inner = MAX_DEPTH - 2
    assert read_body(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    with pytest.raises(BadCall, match="deeper"):
        read_body(b'{"a":' + b"[" * MAX_DEPTH + b"1.5" + b"]" * MAX_DEPTH + b"}")
    with pytest.raises(BadCall, match="deeper"):
        read_body(b'{"b":1e30,"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")


@pytest.mark.parametrize(
    ("text", "told"), [(b"[]", "a list"), (b"7", "a number"), (b'"x"', "a string"), (b"true", "a boolean")]
)
def test_what_is_no_object_is_called_by_its_name(text, told):
    """The sentence says what came instead."""
    with pytest.raises(BadCall, match=told):
        read_body(text)
