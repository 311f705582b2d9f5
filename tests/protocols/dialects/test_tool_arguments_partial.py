"""The valid prefix of a streamed JSON object, compared with the JSON parser of the official SDK."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from proxy.protocols.dialects.tool_arguments import PartialObject

# Pieces that often form valid JSON, and as often invalid JSON.
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


def forwarded(pieces) -> str:
    """Return what is forwarded of these pieces; the SDK's parser reads it after each of them."""
    beginning, text = PartialObject(), ""
    for piece in pieces:
        text += beginning.feed(piece)
        read = from_json(text.encode(), partial_mode=True) if text else {}
        assert read == json.loads(beginning.whole(text))  # as jiter reads it: integers of any size
    return text


@settings(max_examples=60)
@given(TEXTS, st.integers(0, 30))
def test_the_forwarded_prefix_is_readable_and_independent_of_the_chunking(text, index):
    """`whole` completes it as the SDK's partial mode does."""
    once = forwarded([text])

    assert text.startswith(once)
    assert once == forwarded(text) == forwarded([text[:index], text[index:]])


@settings(max_examples=30)
@given(OBJECTS, st.integers(0, 99))
def test_an_object_is_forwarded_completely(value, index):
    """Also if it is truncated anywhere."""
    text = orjson.dumps(value).decode()

    assert text == forwarded([text[:index], text[index:]])
    assert text[:index] == forwarded([text[:index]])


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
def test_invalid_json_is_forwarded_up_to_its_last_valid_character(text, expected, whole):
    """`whole` closes it; a value that is no object becomes an empty one."""
    beginning = PartialObject()

    assert expected == beginning.feed(text)
    assert whole == beginning.whole(expected)


def test_a_long_string_is_parsed_once():
    """300,000 characters in 100,000 pieces, without quadratic time."""
    beginning = PartialObject()

    assert '{"a": "' == beginning.feed('{"a": "')
    assert all(beginning.feed("ab\\n") == "ab\\n" for _ in range(100_000))
    assert '"}' == beginning.feed('"}')
    assert not beginning.broken


@pytest.mark.parametrize("pieces", [(" ", "\n", "{", "}"), ("  ", "", '{"a": 1}'), (" ", " x")])
def test_white_space_before_the_object_is_returned_with_it(pieces):
    """However it is split; before anything else than an object it is withheld."""
    parser = PartialObject()
    found = [parser.feed(piece) for piece in pieces]

    assert "" == found[0]
    assert "".join(found) == ("" if "x" in pieces[-1] else "".join(pieces))
