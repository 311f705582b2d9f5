"""Google's schemas, an OpenAPI dialect with uppercase types, as JSON Schema, which chat templates and engines read."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from proxy.protocols.dialects.gemini.fields import snake_case, texts
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_flag, a_list, a_text, an_object, refusal

_MAX_PATH: Final = 200  # characters, of which the names are those of the client
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(value: Any, path: str) -> Json:
    """Return a schema as JSON Schema; fields that are unknown here are unchanged. Raises UnprocessableRequest."""
    schema: Json = {}
    given = {_NAMES.get(name, name): inner for name, inner in an_object(value, path).items() if inner is not None}
    for name, inner in given.items():
        if name in _READERS:
            field, read = _READERS[name]
            schema[field] = read(inner, _within(path, name))
        elif name == "example":
            schema["examples"] = [inner]
        elif name not in {"nullable", "propertyOrdering"} and (name, inner) != _ENUM_FORMAT:
            schema[name] = inner
    if schema.get("type") == "type_unspecified":
        del schema["type"]
    if given.get("nullable") is not None and a_flag(given["nullable"], f"{path}.nullable"):
        _allow_null(schema)
    if given.get("propertyOrdering") is not None and "properties" in schema:
        order = texts(given["propertyOrdering"], f"{path}.propertyOrdering")
        properties = schema["properties"]
        first = {name: properties[name] for name in order if name in properties}
        schema["properties"] = {**first, **properties}
    return schema


def _allow_null(schema: Json) -> None:
    """Add null to the types, the values or the alternatives of a schema."""
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if "anyOf" in schema and {"type": "null"} not in schema["anyOf"]:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]


def _type(value: Any, path: str) -> str | list[str]:
    if isinstance(value, list):  # JSON Schema's own
        return [name.lower() for name in texts(value, path)]
    return a_text(value, path).lower()


def _schemas(value: Any, path: str) -> list[Json]:
    return [json_schema(inner, f"{path}[{number}]") for number, inner in enumerate(a_list(value, path))]


def _named(value: Any, path: str) -> Json:
    return {name: json_schema(inner, _within(path, name)) for name, inner in an_object(value, path).items()}


def _within(path: str, name: str) -> str:
    """Return the path of a field; a long one ends where it is long, or the paths of many fields would fill the memory."""
    return path if len(path) > _MAX_PATH else f"{path}.{name[:_MAX_PATH]}"


def _additional(value: Any, path: str) -> Any:
    return value if isinstance(value, bool) else json_schema(value, path)


def _number(value: Any, path: str) -> int:
    """Return a number, which the JSON of protocol buffers writes as a string."""
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20):
        return int(value)
    raise refusal(path, "must be an integer")


# By field: the field of JSON Schema and the reader of its value.
_READERS: Final[Mapping[str, tuple[str, Callable[[Any, str], Any]]]] = {
    "type": ("type", _type),
    "properties": ("properties", _named),
    "items": ("items", json_schema),
    "anyOf": ("anyOf", _schemas),
    "enum": ("enum", a_list),
    "additionalProperties": ("additionalProperties", _additional),
    "ref": ("$ref", a_text),
    "defs": ("$defs", _named),
    "$defs": ("$defs", _named),
    **{name: (name, _number) for name in _COUNTS},
}
_ENUM_FORMAT: Final = ("format", "enum")  # of Google's strings with an `enum`; some grammars refuse unknown formats
_NAMES: Final = {snake_case(name): name for name in (*_READERS, "propertyOrdering")}
