"""Arguments generated from a JSON schema."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.sampler import RandomStream
from proxy.simulator.tool_calls import make_arguments

WORDS = ["object", "file", "value"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "enum", "$ref", "anyOf", "minimum", "minLength", "a"]),
            inner,
            max_size=4,
        )
    ),
)


def value_from(schema, seed=1):
    """The value that is made for a property with this schema."""
    return make_arguments({"properties": {"x": schema}}, RandomStream(seed), WORDS)["x"]


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "string"}, lambda x: x in WORDS),
        ({}, lambda x: x in WORDS),
        ({"type": "string", "maxLength": 3}, lambda x: isinstance(x, str) and len(x) == 3),
        ({"type": "string", "minLength": 20}, lambda x: isinstance(x, str) and len(x) >= 20),
        ({"type": "integer"}, lambda x: isinstance(x, int)),
        ({"type": "integer", "minimum": 5, "maximum": 6}, lambda x: x in {5, 6}),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7}, lambda x: x == 6),
        ({"type": "number", "maximum": 2, "minimum": 2}, lambda x: x == 2),
        ({"type": "boolean"}, lambda x: isinstance(x, bool)),
        ({"type": "null"}, lambda x: x is None),
        ({"type": ["string", "null"]}, lambda x: x in WORDS),
        ({"type": "array", "items": {"type": "integer"}}, lambda x: x and all(isinstance(i, int) for i in x)),
        ({"type": "array", "minItems": 4}, lambda x: len(x) == 4),
        ({"type": "array", "maxItems": 0}, lambda x: x == []),
        ({"type": "object", "properties": {"y": {"const": 3}}}, lambda x: x == {"y": 3}),
        ({"enum": ["a", "b"]}, lambda x: x in {"a", "b"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, lambda x: isinstance(x, int)),
    ],
)
def test_values_fit_the_schema(schema, fits):
    """A value fits the type, bounds and enum of its schema, with any seed."""
    assert all(fits(value_from(schema, seed)) for seed in range(20))


def test_references_are_followed():
    """A reference gives a value of the definition that it names; a reference to nothing gives a string."""
    schema = {"properties": {"x": {"$ref": "#/$defs/day"}}, "$defs": {"day": {"const": "Monday"}}}

    assert make_arguments(schema, RandomStream(1), WORDS) == {"x": "Monday"}
    assert value_from({"$ref": "#/$defs/none"}) in WORDS


def test_a_schema_may_refer_to_itself():
    """Values of a schema that refers to itself are limited in depth and number."""
    node = {"type": "object", "properties": {str(i): {"$ref": "#/$defs/node"} for i in range(20)}}
    arguments = make_arguments({**node, "$defs": {"node": node}}, RandomStream(1), WORDS)

    assert str(arguments).count("None") < 5_000


@given(JSON, st.integers())
def test_any_schema_gives_an_object(schema, seed):
    """Any JSON in place of a schema gives an object."""
    assert isinstance(make_arguments(schema, RandomStream(seed), WORDS), dict)
