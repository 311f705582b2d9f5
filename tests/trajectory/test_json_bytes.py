"""JSON of any depth."""

import orjson
import pytest

from proxy.trajectory.json_bytes import to_json_bytes


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
