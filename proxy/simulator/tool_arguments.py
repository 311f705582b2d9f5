"""Generates arguments of a tool call from the tool's JSON schema.

They fit types, bounds, enums and references. Patterns and formats are ignored: models violate them, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.simulator.sampler import RandomStream

Schema = Mapping[str, Any]

_MAX_DEPTH: Final = 6  # schemas can refer to themselves
_MAX_VALUES: Final = 200
_MAX_ITEMS: Final = 2
_MAX_LENGTH: Final = 256  # of strings and arrays, even if the schema requires more


def make_arguments(schema: object, stream: RandomStream, words: Sequence[str]) -> dict[str, Any]:
    """Return arguments that fit the `parameters` of a function; empty if it has none. Strings are made of `words`."""
    if not isinstance(schema, Mapping):
        return {}
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    maker = _ValueMaker(stream, words, definitions if isinstance(definitions, Mapping) else {})
    arguments = maker.value({"type": "object", **schema}, 0)
    return arguments if isinstance(arguments, dict) else {}


class _ValueMaker:
    """Makes values that fit schemas; `definitions` are the schemas that `$ref` can name."""

    __slots__ = ("_count", "_definitions", "_stream", "_words")

    def __init__(self, stream: RandomStream, words: Sequence[str], definitions: Schema) -> None:
        self._stream = stream
        self._words = words
        self._definitions = definitions
        self._count = 0

    def value(self, schema: object, depth: int) -> Any:
        """Return a value that fits; None where the schema is too deep or has too many values."""
        self._count += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._count > _MAX_VALUES:
            return None
        if "const" in schema:
            return schema["const"]
        options = schema.get("enum")
        if isinstance(options, list) and options:
            return options[self._stream.below(len(options))]
        target = self._target(schema)
        if target is not None:
            return self.value(target, depth + 1)
        return self._typed_value(schema, depth)

    def _target(self, schema: Schema) -> object:
        """Return the schema that applies instead: the referenced one, or the first alternative."""
        if isinstance(schema.get("$ref"), str):
            return self._definitions.get(schema["$ref"].rpartition("/")[2], {})
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return schema[key][0]
        return None

    def _typed_value(self, schema: Schema, depth: int) -> Any:
        types = schema.get("type", "object" if "properties" in schema else "string")
        kind = types[0] if isinstance(types, list) and types else types
        if kind == "object":
            properties = schema.get("properties")
            fields = properties if isinstance(properties, Mapping) else {}
            return {str(name): self.value(field, depth + 1) for name, field in fields.items()}
        if kind == "array":
            count = max(1 + self._stream.below(_MAX_ITEMS), _bound(schema, "minItems", 0))
            count = min(count, _bound(schema, "maxItems", count))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(min(count, _MAX_LENGTH))]
        if kind in ("integer", "number"):
            low = _bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0) + 1)
            high = _bound(schema, "maximum", _bound(schema, "exclusiveMaximum", low + 10) - 1)
            integer = self._stream.between(low, max(low, high))
            return integer if kind == "integer" else integer + 0.5 * (integer < high)
        if kind == "boolean":
            return self._stream.below(2) == 1
        return None if kind == "null" else self._string(schema)

    def _string(self, schema: Schema) -> str:
        text = self._words[self._stream.below(len(self._words))]
        min_length = min(max(_bound(schema, "minLength", 0), 0), _MAX_LENGTH)
        text *= 1 + min_length // len(text)
        return text[: max(min_length, _bound(schema, "maxLength", len(text)))]


def _bound(schema: Schema, key: str, default: int) -> int:
    """Return a bound of a schema as an integer; the default if it is absent or no reasonable number."""
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 40 else default
