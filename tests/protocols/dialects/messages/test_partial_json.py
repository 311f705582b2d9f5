"""The beginning of a JSON object, piece by piece, as the official SDK reads it."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from proxy.protocols.dialects.messages.partial_json import PartialObject

# Pieces that make JSON often, and break it as often.
SCRAPS = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", '"', '"a"', '"a":', '{"a":', "1", "-", ".", "e", "0", "12", "1e308", "9" * 15, "true",
     "fal", "nul", "l", " ", "\n", "\\", "u", "d83d", "\\ud83d", "\\ude00", "\\u00e9", "é", "😀", "x", "NaN"]
)  # fmt: skip
TEXTS = st.lists(SCRAPS, max_size=9).map("".join) | st.lists(SCRAPS, max_size=9).map(lambda it: '{"a":' + "".join(it))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


def told(pieces) -> str:
    """What is let through of these pieces; a client reads it after each of them, and never fails."""
    beginning, sofar = PartialObject(), ""
    for piece in pieces:
        sofar += beginning.feed(piece)
        read = from_json(sofar.encode(), partial_mode=True) if sofar else {}
        assert read == json.loads(beginning.whole(sofar))  # as jiter reads it: integers of any size
    return sofar


@settings(max_examples=60)
@given(TEXTS, st.integers(0, 30))
def test_no_text_breaks_a_client_and_pieces_make_no_difference(text, at):
    """A prefix of the text is told, the same one however it is cut; `whole` is what partial mode makes of it."""
    once = told([text])

    assert text.startswith(once)
    assert once == told(text) == told([text[:at], text[at:]])


@settings(max_examples=30)
@given(OBJECTS, st.integers(0, 99))
def test_an_object_is_let_through_as_it_comes(given, at):
    """Whole, and cut off anywhere."""
    text = orjson.dumps(given).decode()

    assert text == told([text[:at], text[at:]])
    assert text[:at] == told([text[:at]])


@pytest.mark.parametrize(
    ("text", "expected", "whole"),
    [
        ('{"city": "Par', '{"city": "Par', "{}"),
        ('{"a": 1, "b": [2, {"c": tr', '{"a": 1, "b": [2, {"c": tr', '{"a": 1, "b": [2, {}]}'),
        ('{"a": 12', '{"a": 12', '{"a": 12}'),
        ('{"a": 1} and so on', '{"a": 1} ', '{"a": 1}'),
        ('{"a": "two\nlines"}', '{"a": "two', "{}"),
        ('{"a": 1,}', '{"a": 1,', '{"a": 1}'),
        ('{"a": 1e999}', '{"a": 1e99', '{"a": 1e99}'),
        ("[1]", "", "{}"),
        ("false", "", "{}"),
        ("  ", "", "{}"),
        ('  {"a"', '  {"a"', "  {}"),
        ("", "", "{}"),
        ('{"a": ' + "[" * 150, '{"a": ' + "[" * 99, '{"a": ' + "[" * 99 + "]" * 99 + "}"),
        ('{"a": ' + "9" * 150, '{"a": ' + "9" * 100, '{"a": ' + "9" * 100 + "}"),
    ],
)
def test_what_is_told_of_a_text_and_what_it_comes_to(text, expected, whole):
    """What was cut off stays out; what is no object is none."""
    beginning = PartialObject()

    assert expected == beginning.feed(text)
    assert whole == beginning.whole(expected)


def test_a_long_string_is_read_once():
    """Pieces of it are not gone through again: 300,000 of them take a moment."""
    beginning = PartialObject()

    assert '{"a": "' == beginning.feed('{"a": "')
    assert all(beginning.feed("ab\\n") == "ab\\n" for _ in range(100_000))
    assert '"}' == beginning.feed('"}')
    assert not beginning.broken
