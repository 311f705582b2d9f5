"""The tool calls of replies: their arguments, made from the tool's JSON schema, and their text.

A real model samples calls as its template repeats them, and a parser for this syntax reads them. The simulated model takes
the syntax from the template itself: it renders the chat with and without the calls. Calls in the syntax of
`proxy.simulator.template` are parsed as text; calls in other syntax are recognized as a whole, hence only if they are complete.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.simulator.errors import RequestError
from proxy.simulator.parser import ToolCall
from proxy.simulator.sampler import RandomStream
from proxy.simulator.script import ScriptedCall
from proxy.simulator.template import COMPACT, SPACED, call_text, json_text, to_json

if TYPE_CHECKING:
    from proxy.simulator.model import Model

_EMPTY_REASONING: Final = re.compile(r"^\s*<think>\s*</think>\s*")

Render = Callable[[Sequence[dict[str, Any]]], str]
"""Returns the text of the chat with more messages; without any, it ends with the generation prompt."""


@dataclass(slots=True)
class CallSyntax:
    """Writes the calls of the replies to one chat. `blocks`: the texts in the template's own syntax, with their calls."""

    render: Render
    model: "Model"
    blocks: dict[str, Sequence[ToolCall]] = field(default_factory=dict)

    def write(self, calls: Sequence[ScriptedCall], stream: RandomStream) -> str:
        """Return the text of the calls, each at the model's rate in other white space than the template's."""
        rate = self.model.noncanonical_rate
        separators = [
            (COMPACT, SPACED)[stream.below(2)] if rate and stream.unit() < rate else (", ", ": ") for _ in calls
        ]
        arguments = [_object(call.arguments) for call in calls]
        objects = [value for value in arguments if value is not None]
        if calls and self.model.template is not None and len(objects) == len(calls):
            names = [call.name for call in calls]
            block = self._block(names, objects)
            if block is not None and block != "\n".join(map(call_text, names, objects)):
                for value, pair in zip(objects, separators, strict=True):
                    if value:
                        block = block.replace(to_json(value), json_text(value, pair), 1)
                self.blocks[block] = [ToolCall(name, to_json(v)) for name, v in zip(names, objects, strict=True)]
                return block
        pairs = zip(calls, separators, strict=True)
        return "\n".join(call_text(call.name, call.arguments, pair) for call, pair in pairs)

    def _block(self, names: Sequence[str], arguments: Sequence[dict[str, Any]]) -> str | None:
        """Return the calls as the template writes them; None if they are not at the end of its text."""
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": value}}
                for index, (name, value) in enumerate(zip(names, arguments, strict=True))
            ],
        }
        try:
            before = self.render([])
            text = self.render([message])
        except RequestError:
            return None
        if not text.startswith(before):
            return None
        stops = [self.model.tokenizer.decode([token]) for token in self.model.eos_ids]
        block = re.split("|".join(map(re.escape, stops)), text[len(before) :], maxsplit=1)[0]
        block = _EMPTY_REASONING.sub("", block).rstrip()
        return block if all(name in block for name in names) else None


def _object(arguments: object) -> dict[str, Any] | None:
    """Return arguments as an object; None for text that is not a JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None


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
