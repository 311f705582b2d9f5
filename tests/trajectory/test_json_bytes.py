"""JSON of any depth."""

import orjson
import pytest

from proxy.trajectory.json_bytes import parse_text, size_of, to_json_bytes


def nested(depth, inner):
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("value", [None, 1, "ü", [1, {"a": [None]}], {"a": (1, float("nan"))}])
def test_values_that_orjson_supports_are_written_identically(value):
    assert orjson.dumps(value) == to_json_bytes(value)


@pytest.mark.parametrize("depth", [1, 253, 254, 255, 256, 400])
def test_values_beyond_orjsons_254_levels_are_written(depth):
    """NaN becomes null."""
    value = {"request": {"messages": [nested(depth, float("nan"))]}, "b": 2}

    text = to_json_bytes(value)

    assert (b"[" * depth + b"null" + b"]" * depth) in text
    assert text.endswith(b',"b":2}')


def test_a_value_that_is_not_json_raises_type_error():
    with pytest.raises(TypeError):
        to_json_bytes({"a": [object()]})


def test_the_json_of_a_text_is_parsed():
    """Invalid JSON is a ValueError."""
    assert parse_text('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="unexpected"):
        parse_text("{")


@pytest.mark.parametrize("value", ["[],", "{},", "1,"])
def test_a_text_with_very_many_values_is_not_parsed(value):
    """The limits of a body do not count the values in its texts."""
    assert parse_text("[" + value * 100_000 + "2]")[-1] == 2
    with pytest.raises(ValueError, match="too many values"):
        parse_text("[" + value * 300_000 + "2]")


@pytest.mark.parametrize(
    ("values", "size"),
    [([], 0), (["abc"], 3), ([["abc"]], 67), ([{"a": "abc"}], 67), ([1, None], 0), ([["a" * 50, "b" * 50]], 228)],
)
def test_the_size_of_values_counts_texts_and_64_bytes_for_each_value(values, size):
    """It stops at the limit, so that it takes no time for long lists."""
    assert size == size_of(values, 1000)


def test_the_size_of_values_is_not_counted_above_a_limit():
    """The values in a list that is too long are not visited."""
    assert size_of([["a" * 100] * 1000], 50) == 64_000
