"""Arguments of tool calls: sampled texts in chat, objects in dialects with a field for an object (Messages, Gemini).

A sampled text and its object differ in spaces, escapes and the order of keys, and a truncated or invalid text is no object.
A client does not send the text back, so it is looked up by the call's id.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.protocols.dialects.partial_json import MAX_DEPTH, MAX_NUMBER_LENGTH, PartialObject
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import refusal
from proxy.trajectory.json_bytes import parse_text, write_python

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)  # orjson has no spaces after commas and colons

_LONG_NUMBER: Final = re.compile(rf"(?<![-+.0-9eE])[-+.0-9eE]{{{MAX_NUMBER_LENGTH + 1}}}")  # each run is read once


def parse_arguments(arguments: str) -> Json:
    """Return the client's object of a sampled text: the values that are complete."""
    if arguments.count("{") + arguments.count("[") <= MAX_DEPTH and not _LONG_NUMBER.search(arguments):
        try:
            read = parse_text(arguments)  # faster, with the same result for what is accepted above
        except ValueError:
            read = None
        if isinstance(read, dict):
            return read
    partial = PartialObject()
    prefix = partial.feed(arguments)
    return dict(orjson.loads(partial.whole(prefix)))


def serialize(arguments: Json, path: str) -> str:
    """Serialize an object like models and engines' parsers: vLLM's and SGLang's write Python's own JSON."""
    try:
        return write_python(arguments, _ENCODER)
    except RecursionError:
        raise refusal(path, "is nested too deeply") from None


class SampledCalls:
    """The chat calls of earlier responses by id. The arguments of each are parsed once, however often a body repeats its id."""

    __slots__ = ("_calls", "_parsed")

    def __init__(self, calls: Mapping[str, Json]) -> None:
        self._calls = calls
        self._parsed: dict[str, Json] = {}

    def restored(self, tool_input: Json, name: str, call_id: str, path: str) -> str:
        """Return the arguments of a call that was sent back: the sampled text if it is equal, else the serialized object."""
        function = self._calls.get(call_id, {}).get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                if call_id not in self._parsed:
                    self._parsed[call_id] = parse_arguments(arguments)
                if is_same(self._parsed[call_id], tool_input):
                    return arguments
        return serialize(tool_input, path)


def call_ids(calls: Sequence[Any], step_id: str, prefix: str = "toolu") -> list[str]:
    """Return the rendered ids of a message's calls: their own, unless one is missing or duplicated."""
    seen: set[str] = set()
    return [
        choose_call_id(call.get("id") if isinstance(call, Mapping) else None, seen, step_id, index, prefix)
        for index, call in enumerate(calls)
    ]


def choose_call_id(own: Any, seen: set[str], step_id: str, index: int, prefix: str = "toolu") -> str:
    """Return the rendered id of the call with this index, and add it to `seen`."""
    call_id = own if isinstance(own, str) and own and own not in seen else f"{prefix}_{step_id}_{index}"
    seen.add(call_id)
    return call_id


def is_same(left_value: Any, right_value: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0 (JavaScript has one number type), and not true."""
    pairs = [(left_value, right_value)]
    while pairs:  # an explicit stack: bodies may be nested deeper than Python's recursion limit
        left, right = pairs.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            if left.keys() != right.keys():
                return False
            pairs += [(left[key], right[key]) for key in left]
        elif isinstance(left, list) and isinstance(right, list):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif isinstance(left, bool) is not isinstance(right, bool) or left != right:
            return False
    return True
