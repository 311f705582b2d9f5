"""The images of a call, and their places in its prompt."""

from array import array
from copy import deepcopy
from itertools import groupby

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_step

from proxy.trajectory.blocks import IMAGE, names_of
from proxy.trajectory.images import (
    IMAGES,
    MARK,
    PlacedImage,
    aligned,
    block_of,
    data_in,
    data_of,
    distinct,
    message_of,
    names_in,
    piece_of,
    placed,
    put_back,
    recorded,
    runs,
    taken_out,
)

PNG, GIF, WEB = "data:image/png;base64,AAAA", "data:image/gif;base64,BBBB", "https://example.com/a.png"
PAD = 99
IDS = st.lists(st.sampled_from([1, 2, PAD]), max_size=30).map(lambda ids: array("i", ids))


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts, role="user"):
    return {"role": role, "content": list(parts)}


def step(prompt, *names, token=PAD, step_id="a", **facts):
    extra = {"request_key": step_id, IMAGES: {"ids": list(names), "token": token}}
    return make_step(step_id, prompt, [7, 8], extra=extra, **facts)


def test_images_are_named_in_the_order_of_the_messages():
    """Equal data has one name, also with another type; an image by URL has the URL as its name."""
    messages = [
        message({"type": "text", "text": "a"}, part(PNG), part(WEB)),
        message({"type": "input_image", "image_url": GIF}, role="tool"),
        message(part(PNG.replace("png", "jpeg")), "odd", {"image_url": 3}, {"type": "image_url"}),
        {"role": "user", "content": "text"},
        "odd",
    ]
    first, web, second, again = names_in(messages)

    assert (WEB, first) == (web, again)
    assert len(first) == len(second) == 32
    assert first != second
    assert {data: name.hex() for data, name in data_in(messages).items()} == {"AAAA": first, "BBBB": second}
    assert names_in(None) == names_in([{}]) == []


@pytest.mark.parametrize("url", ["data:", "data:,", "data:,\N{SNOWMAN}", "data:,\ud800"])
def test_data_that_is_empty_or_no_ascii_has_a_name_and_is_not_stored_apart(url):
    assert len(names_in([message(part(url))])[0]) == 32
    assert data_in([message(part(url))]) == {}


@given(IDS)
def test_runs_equal_the_groups_of_itertools(ids):
    starts, found = 0, []
    for token, same in groupby(ids):
        length = len(list(same))
        found += [(starts, length)] if token == PAD else []
        starts += length

    assert found == runs(ids, PAD)


@pytest.mark.parametrize(
    ("prompt", "candidates", "expected"),
    [
        ([1, PAD, PAD, 2, PAD], [PAD], (PAD, ())),
        ([1, PAD, PAD, 2, PAD], [50, PAD], (PAD, ())),
        ([1, PAD, PAD, 2], [PAD], (None, ("image_count",))),
        ([1, PAD, 2, PAD, 3, PAD], [50, PAD], (None, ("image_count",))),
        ([1, 2], [PAD], (None, ())),
        ([1, PAD, 50, PAD, 50], [50, PAD], (None, ())),
        ([1, PAD, 2, PAD], [], (None, ())),
    ],
)
def test_a_placeholder_has_one_run_for_each_image(prompt, candidates, expected):
    """Another number of runs is a problem; an unknown placeholder, or two that fit, is none, and has no places."""
    assert aligned(["a", "b"], candidates, [array("i", prompt)]) == expected


def test_several_prompts_have_no_places():
    assert aligned(["a"], [PAD], [array("i", [PAD]), array("i", [PAD])]) == (None, ())


def test_places_are_where_the_runs_are():
    two = step([1, PAD, PAD, 2, PAD], "a", WEB)

    assert [PlacedImage("a", 1, 2), PlacedImage(WEB, 4, 1)] == placed(two, two.prompts[0])
    for other in (step([1], "a"), step([PAD], "a", token=None), step([PAD], "a", token="9")):
        assert [PlacedImage("a", None, None)] == placed(other, other.prompts[0])


@pytest.mark.parametrize("images", [None, 3, {}, {"ids": 3}, {"ids": [3]}, {"ids": None, "token": 1}])
def test_a_step_with_an_odd_record_of_images_has_none(images):
    odd = make_step("a", [PAD], [1], extra={IMAGES: images})

    assert list(recorded(odd)) == placed(odd, odd.prompts[0]) == []
    assert ("", odd.prompts[0]) == distinct(odd, odd.prompts[0])


NAMED = st.lists(st.sampled_from(["a", "b", "c" * 32]), max_size=3)


@given(NAMED, NAMED, st.integers(1, 6))
def test_ids_differ_where_images_differ(mine, others, length):
    """A prompt begins with another one only if its images begin with the other's images."""
    prompts = []
    for names in (mine, others):
        ids = [1, *(token for _ in names for token in ([PAD] * length + [2]))]
        prompts.append(distinct(step(ids, *names), array("i", ids)))
    (key, ids), (other_key, other_ids) = prompts

    assert key == other_key == ""
    assert (mine[: len(others)] == others) == (ids[: len(other_ids)] == other_ids)
    assert all(token < 0 for token in ids if token not in {1, 2, PAD})


def test_images_of_unknown_places_are_a_key():
    unknown = step([1, 2], "a", "b", token=None)

    assert ("a\nb", unknown.prompts[0]) == distinct(unknown, unknown.prompts[0])


def test_only_data_has_the_name_of_a_block():
    assert block_of("00" * 16) == bytes(16)
    assert [block_of(name) for name in (WEB, "00" * 15, "0G" * 16, "AA" * 16)] == [None] * 4


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

    assert [len(path) for _, *path in places] == [5001]


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


def test_an_image_has_the_name_of_its_block():
    """A chain of one piece. Its name is not computed again when its data is stored."""
    assert names_in([message(part("data:,AAAA"))]) == [names_of(IMAGE, [b"AAAA"])[0].hex()]
