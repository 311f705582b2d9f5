"""JSON of any depth."""

import orjson
import pytest

from proxy.trajectory.json_bytes import to_json_bytes


def nested(depth, inner):
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("value", [None, 1, "ü", [1, {"a": [None]}], {"a": (1, float("nan"))}])
def test_what_orjson_writes_is_written_as_it_does(value):
    """Byte for byte."""
    assert orjson.dumps(value) == to_json_bytes(value)


@pytest.mark.parametrize("depth", [1, 253, 254, 255, 256, 400])
def test_depth_is_no_obstacle(depth):
    """Beyond orjson's limit of 254 levels, too; NaN is null there as well."""
    value = {"request": {"messages": [nested(depth, float("nan"))]}, "b": 2}

    text = to_json_bytes(value)

    assert (b"[" * depth + b"null" + b"]" * depth) in text
    assert text.endswith(b',"b":2}')


def test_what_is_no_json_is_refused():
    """At any depth."""
    with pytest.raises(TypeError):
        to_json_bytes({"a": [object()]})
