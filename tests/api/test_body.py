"""Parsing of request bodies."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from proxy.api.body import MAX_DEPTH, faults_of, read_body
from proxy.errors import BadRequest, RequestTooLarge


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_parsed_or_raise_bad_request(text):
    try:
        assert isinstance(read_body(text), dict)
    except BadRequest as error:
        assert error.message


@given(
    st.dictionaries(
        st.text(max_size=5), st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30)
    )
)
def test_an_accepted_body_is_unchanged(body):
    """An integer that does not fit in 64 bits is rejected, not rounded."""
    text = json.dumps(body).encode()
    if any(type(value) is int and not -(2**63) <= value < 2**64 for value in body.values()):
        with pytest.raises(BadRequest, match="64 bits"):
            read_body(text)
    else:
        assert body == read_body(text)


def test_digits_in_strings_and_floats_are_not_counted_as_integers():
    assert read_body(b'{"a": "' + b"1" * 30 + b'", "b": 1e30, "c": 2e+25}') == {"a": "1" * 30, "b": 1e30, "c": 2e25}


def test_the_maximum_nesting_is_below_the_encoders():
    """An accepted body can always be encoded."""
    inner = MAX_DEPTH - 2
    assert read_body(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    with pytest.raises(BadRequest, match="deeper"):
        read_body(b'{"a":' + b"[" * MAX_DEPTH + b"1.5" + b"]" * MAX_DEPTH + b"}")
    with pytest.raises(BadRequest, match="deeper"):
        read_body(b'{"b":1e30,"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")


@pytest.mark.parametrize(
    ("text", "kind"), [(b"[]", "a list"), (b"7", "a number"), (b'"x"', "a string"), (b"true", "a boolean")]
)
def test_a_body_that_is_not_an_object_is_rejected_with_its_type(text, kind):
    with pytest.raises(BadRequest, match=kind):
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
def test_only_integers_beyond_64_bits_are_rejected(text, refused):
    """Digits within strings and floats are accepted, also beside such an integer."""
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
def test_integers_are_distinguished_from_floats_and_strings(literals):
    """Python's parser, which keeps integers of any length, has the same result."""
    text = b'{"a":[' + ",".join(literals).encode() + b"]}"
    expected = json.loads(text)
    if any(type(value) is int and not -(2**63) <= value < 2**64 for value in expected["a"]):
        with pytest.raises(BadRequest, match="64 bits"):
            read_body(text)
    else:
        assert read_body(text) == expected


def test_a_body_with_too_many_values_is_rejected_before_it_is_parsed():
    """Values are estimated by counting characters; token ids and conversations are far below the limit."""
    assert read_body(b'{"prompt":[%s]}' % b",".join([b"123456"] * 500_000))
    assert read_body(b'{"messages":[%s]}' % b",".join([b'{"role":"user","content":"hi"}'] * 30_000))
    assert read_body(b'{"messages":"%s"}' % (b'{\\"name\\": \\"x\\", \\"value\\": [1, 2]}\\n' * 100_000))
    for bomb in (b"{},", b"[],", b"1,", b'"",', b'{"a":1},', b'"ab",'):
        with pytest.raises(RequestTooLarge, match="too many JSON values"):
            read_body(b'{"a":[%s1]}' % (bomb * (8 * 2**20 // len(bomb))))


def test_a_body_with_more_than_1000_fields_is_rejected():
    """The top level of a body is copied several times."""
    with pytest.raises(BadRequest, match="1001 fields"):
        read_body(json.dumps({str(n): n for n in range(1001)}).encode())


def test_a_body_with_too_many_long_digit_sequences_is_rejected():
    """The limit applies if the body has a number beyond 64 bits."""
    with pytest.raises(BadRequest, match="long sequences of digits"):
        read_body(b'{"f":1e300,"a":"%s"}' % (b"1234567890123456789 " * 100_001))


def test_more_than_1000_invalid_values_are_one_error():
    """Long values are not quoted in errors."""

    class Shape(BaseModel):
        a: list[int]

    def faults(values):
        with pytest.raises(ValidationError) as caught:
            Shape.model_validate({"a": values})
        return faults_of(caught.value)

    assert faults(["x"] * 1001) == [{"type": "too_many_faults", "loc": (), "msg": "1001 values are invalid"}]
    (short, long) = faults(["x", "x" * 101])
    assert (short["input"], short["loc"]) == ("x", ("a", 0))
    assert "input" not in long
