"""Google's schemas as JSON Schema."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.request import json_schema


def test_a_schema_of_googles_reference_becomes_json_schema():
    """Types in lower case, null as a type, numbers for counts, no format of enums, in the order of `propertyOrdering`."""
    schema = {
        "type": "OBJECT",
        "description": "A recipe.",
        "properties": {
            "steps": {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1", "max_items": 9},
            "name": {"type": "STRING", "nullable": True, "example": "Soup"},
            "size": {"type": "STRING", "format": "enum", "enum": ["S", "L"], "nullable": True},
        },
        "required": ["name"],
        "propertyOrdering": ["name", "steps", "unknown"],
    }

    converted = json_schema(schema, "p")

    assert {
        "type": "object",
        "description": "A recipe.",
        "properties": {
            "name": {"type": ["string", "null"], "examples": ["Soup"]},
            "steps": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 9},
            "size": {"type": ["string", "null"], "enum": ["S", "L", None]},
        },
        "required": ["name"],
    } == converted
    assert ["name", "steps", "size"] == list(converted["properties"])


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "TYPE_UNSPECIFIED"}, {}),
        ({"type": ["STRING", "NULL"]}, {"type": ["string", "null"]}),
        ({"anyOf": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"any_of": [{"type": "NULL"}], "nullable": True}, {"anyOf": [{"type": "null"}]}),
        ({"type": "STRING", "nullable": False, "title": None}, {"type": "string"}),
        ({"type": "object", "propertyOrdering": ["a"]}, {"type": "object"}),
        (
            {"ref": "#/$defs/A", "defs": {"A": {"type": "INTEGER"}}},
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "integer"}}},
        ),
        ({"$ref": "#/$defs/A", "const": 1}, {"$ref": "#/$defs/A", "const": 1}),
        ({"additionalProperties": False}, {"additionalProperties": False}),
        ({"additional_properties": {"type": "NUMBER"}}, {"additionalProperties": {"type": "number"}}),
        ({"properties": {"min_items": {"type": "STRING"}}}, {"properties": {"min_items": {"type": "string"}}}),
    ],
)
def test_other_fields_and_spellings(schema, expected):
    """Names of properties are never changed."""
    assert expected == json_schema(schema, "p")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "p: must be an object"),
        ({"type": 1}, "p.type: must be a string"),
        ({"items": {"type": 1}}, "p.items.type: must be a string"),
        ({"properties": {"a": 1}}, "p.properties.a: must be an object"),
        ({"anyOf": [1]}, r"p.anyOf\[0\]: must be an object"),
        ({"minItems": "x"}, "p.minItems: must be an integer"),
        ({"nullable": 1}, "p.nullable: must be true or false"),
        ({"properties": {}, "propertyOrdering": [1]}, r"p.propertyOrdering\[0\]: must be a string"),
    ],
)
def test_an_invalid_schema_is_rejected_by_its_field(schema, message):
    with pytest.raises(UnprocessableRequest, match=message):
        json_schema(schema, "p")
