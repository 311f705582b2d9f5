"""Reading what clients send."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from proxy.api.body import MAX_DEPTH, faults_of, read_body
from proxy.errors import BadRequest, RequestTooLarge


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_bytes_are_read_or_refused_and_nothing_else(text):
    """Only BadRequest escapes, and it says something."""
    try:
        assert isinstance(read_body(text), dict)
    except BadRequest as error:
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
        with pytest.raises(BadRequest, match="64 bits"):
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
    with pytest.raises(BadRequest, match="deeper"):
        read_body(b'{"a":' + b"[" * MAX_DEPTH + b"1.5" + b"]" * MAX_DEPTH + b"}")
    with pytest.raises(BadRequest, match="deeper"):
        read_body(b'{"b":1e30,"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")


@pytest.mark.parametrize(
    ("text", "told"), [(b"[]", "a list"), (b"7", "a number"), (b'"x"', "a string"), (b"true", "a boolean")]
)
def test_what_is_no_object_is_called_by_its_name(text, told):
    """The sentence says what came instead."""
    with pytest.raises(BadRequest, match=told):
        read_body(text)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (b'"%s", 1e30' % (b"9" * 30), None),
        (b'"100000000000000000000", 1e20', None),
        (b'"\\\\", "100000000000000000000", "\\"", 1e20', None),
        (b'"100000000000000000000", 100000000000000000000', "100000000000000000000"),
        (b'"\\\\", 100000000000000000000', "100000000000000000000"),
        (b'"\\"100000000000000000000", 100000000000000000000', "100000000000000000000"),
        (b"1e300, 1.100000000000000000000, 1e-100000000000000000000, 1.5E+0000000000000000000012", None),
        (b"1e300, 18446744073709551615, -9223372036854775808", None),
        (b"1e300, -9223372036854775809", "-9223372036854775809"),
        (b"[[18446744073709551616]]", "18446744073709551616"),
    ],
)
def test_only_an_integer_that_would_change_is_refused(text, refused):
    """Neither digits within a string nor any float, whatever stands beside them."""
    body = b'{"a":[' + text + b"]}"
    if refused is None:
        assert json.loads(body, parse_float=float) == read_body(body)
    else:
        with pytest.raises(BadRequest, match=f"Integer {refused} does"):
            read_body(body)


@given(
    st.lists(
        st.integers(-(2**70), 2**70).map(str)
        | st.floats(allow_nan=False, allow_infinity=False).map(repr)
        | st.integers(2**63, 2**70).map(lambda value: f"{value}.0")
        | st.tuples(st.text('\\"0123456789:,', max_size=8), st.integers(2**60, 2**66)).map(
            lambda pair: json.dumps(f"{pair[0]}{pair[1]}")
        )
    )
)
def test_integers_are_told_from_floats_and_texts(literals):
    """As Python's own parser tells them, which keeps integers of any length."""
    text = b'{"a":[' + ",".join(literals).encode() + b"]}"
    expected = json.loads(text)
    if any(type(value) is int and not -(2**63) <= value < 2**64 for value in expected["a"]):
        with pytest.raises(BadRequest, match="64 bits"):
            read_body(text)
    else:
        assert expected == read_body(text)


def test_a_body_of_more_values_than_memory_allows_is_refused_before_it_is_parsed():
    """By counting characters; token ids and conversations are far from that."""
    assert read_body(b'{"prompt":[%s]}' % b",".join([b"123456"] * 500_000))
    assert read_body(b'{"messages":[%s]}' % b",".join([b'{"role":"user","content":"hi"}'] * 30_000))
    assert read_body(b'{"messages":"%s"}' % (b'{\\"name\\": \\"x\\", \\"value\\": [1, 2]}\\n' * 100_000))
    for bomb in (b"{},", b"[],", b"1,", b'"",', b'{"a":1},', b'"ab",'):
        with pytest.raises(RequestTooLarge, match="too many JSON values"):
            read_body(b'{"a":[%s1]}' % (bomb * (8 * 2**20 // len(bomb))))


def test_a_body_has_so_many_fields():
    """Its top level is copied more than once."""
    with pytest.raises(BadRequest, match="1001 fields"):
        read_body(json.dumps({str(n): n for n in range(1001)}).encode())


def test_long_digits_are_searched_for_so_long():
    """A body with a number beyond 64 bits and very many long sequences of digits is refused instead."""
    with pytest.raises(BadRequest, match="long sequences of digits"):
        read_body(b'{"f":1e300,"a":"%s"}' % (b"1234567890123456789 " * 100_001))


def test_very_many_faults_are_one():
    """Of a body of the wrong shape; and what is long is not sent back."""

    class Shape(BaseModel):
        a: list[int]

    def faults(values):
        with pytest.raises(ValidationError) as caught:
            Shape.model_validate({"a": values})
        return faults_of(caught.value)

    assert [{"type": "too_many_faults", "loc": (), "msg": "1001 values are invalid"}] == faults(["x"] * 1001)
    (short, long) = faults(["x", "x" * 101])
    assert ("x", ("a", 0)) == (short["input"], short["loc"])
    assert "input" not in long
