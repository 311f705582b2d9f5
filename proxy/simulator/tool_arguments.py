"""Arguments for a tool call, made up from the JSON schema of the tool.

Holds the invention of values that fit a schema's types, bounds, choices and references, and nothing of how a
call is written. Patterns and formats are not looked at: a simulated model may well be wrong about them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.simulator.sampler import Draws

Schema = Mapping[str, Any]

_DEEPEST: Final = 6  # schemas may refer to themselves
_MOST_VALUES: Final = 200
_MOST_ITEMS: Final = 2
_LONGEST: Final = 256  # of texts and arrays, whatever a schema demands


def make_arguments(schema: object, draws: Draws, words: Sequence[str]) -> dict[str, Any]:
    """Arguments that fit the `parameters` of a function; empty if it says nothing of them."""
    if not isinstance(schema, Mapping):
        return {}
    root = schema.get("$defs") or schema.get("definitions") or {}
    made = _Maker(draws, words, root if isinstance(root, Mapping) else {}).value({"type": "object", **schema}, 0)
    return made if isinstance(made, dict) else {}


class _Maker:
    """Makes values; `definitions` are the schemas that others may refer to."""

    __slots__ = ("_definitions", "_draws", "_made", "_words")

    def __init__(self, draws: Draws, words: Sequence[str], definitions: Schema) -> None:
        self._draws = draws
        self._words = words
        self._definitions = definitions
        self._made = 0

    def value(self, schema: object, depth: int) -> Any:
        """A value that fits; null where a schema goes too deep or wide."""
        self._made += 1
        if not isinstance(schema, Mapping) or depth > _DEEPEST or self._made > _MOST_VALUES:
            return None
        if "const" in schema:
            return schema["const"]
        choices = schema.get("enum")
        if isinstance(choices, list) and choices:
            return choices[self._draws.below(len(choices))]
        other = self._other(schema)
        if other is not None:
            return self.value(other, depth + 1)
        return self._typed(schema, depth)

    def _other(self, schema: Schema) -> object:
        """The schema that stands for this one: what it refers to, or the first of its alternatives."""
        if isinstance(schema.get("$ref"), str):
            return self._definitions.get(schema["$ref"].rpartition("/")[2], {})
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return schema[key][0]
        return None

    def _typed(self, schema: Schema, depth: int) -> Any:
        kinds = schema.get("type", "object" if "properties" in schema else "string")
        kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
        if kind == "object":
            properties = schema.get("properties")
            fields = properties if isinstance(properties, Mapping) else {}
            return {str(name): self.value(field, depth + 1) for name, field in fields.items()}
        if kind == "array":
            count = max(1 + self._draws.below(_MOST_ITEMS), _bound(schema, "minItems", 0))
            count = min(count, _bound(schema, "maxItems", count))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(min(count, _LONGEST))]
        if kind in ("integer", "number"):
            low = _bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0) + 1)
            high = _bound(schema, "maximum", _bound(schema, "exclusiveMaximum", low + 10) - 1)
            whole = self._draws.between(low, max(low, high))
            return whole if kind == "integer" else whole + 0.5 * (whole < high)
        if kind == "boolean":
            return self._draws.below(2) == 1
        return None if kind == "null" else self._text(schema)

    def _text(self, schema: Schema) -> str:
        text = self._words[self._draws.below(len(self._words))]
        shortest = min(max(_bound(schema, "minLength", 0), 0), _LONGEST)
        text *= 1 + shortest // len(text)
        return text[: max(shortest, _bound(schema, "maxLength", len(text)))]


def _bound(schema: Schema, key: str, default: int) -> int:
    """A bound of a schema as a whole number; the default if it has none that is one."""
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 40 else default
