"""The data of images in JSON values."""

from copy import deepcopy

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.image_texts import MARK, data_of, message_of, piece_of, put_back, taken_out

NAMES = {data: bytes([number]) * 16 for number, data in enumerate(("AAAA", "data", "x", "AA+/", "AAAB"))}
BY_NAME = {name: data for data, name in NAMES.items()}
URLS = [f"{head}{data}" for data in NAMES for head in ("", "data:,", "data:image/png;base64,", "DATA:x,", "other,")]
URLS += ["AA-_", "data:,AA-_", "AA-/"]
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.sampled_from(URLS) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
CONTAINERS = st.lists(VALUES, max_size=4) | st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(CONTAINERS)
def test_data_that_is_taken_out_can_be_put_back(value):
    """The value itself is not changed."""
    before = deepcopy(value)
    rest, places = taken_out(value, NAMES)

    assert before == value
    assert bool(places) == (rest != value)
    assert value == put_back(deepcopy(rest), orjson.loads(orjson.dumps(places)), BY_NAME.__getitem__)


@given(VALUES)
def test_a_piece_is_the_json_of_its_message_or_begins_with_the_mark(message):
    piece = piece_of(message, NAMES)
    read = message_of(piece, BY_NAME.__getitem__) if piece.startswith(MARK) else orjson.loads(piece)

    assert message == read


def test_a_message_that_is_nested_deeper_than_pythons_stack_is_read():
    message: list = ["AAAA"]
    for _ in range(5000):
        message = [message]
    _, places = taken_out(message, NAMES)

    assert [5001] == [len(path) for _, *path in places]


@pytest.mark.parametrize(
    ("text", "data"),
    [("data:image/png;base64,AAAA", "AAAA"), ("AAAA", "AAAA"), ("data:", ""), ("https://a/b,c", "https://a/b,c")],
)
def test_the_data_of_a_string_follows_the_comma_of_a_data_url_or_is_all_of_it(text, data):
    assert data == data_of(text)


@pytest.mark.parametrize(
    "places", [[["00", "a"]], [["00" * 16, "b"]], [["00" * 16, "a", 1]], [["zz", "a"]], [[]], [3], 3]
)
def test_places_that_are_none_of_a_value_raise(places):
    with pytest.raises((LookupError, TypeError, ValueError)):
        put_back({"a": "data:,"}, places, BY_NAME.__getitem__)
