"""Compact JSON of any depth, and the JSON in texts.

orjson (3.11) writes at most 254 levels. A recorded request of that depth is deeper as part of a row or a response:
without this module, one rollout could make an export of all rollouts fail.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from typing import Any, Final

import orjson

_CONTAINERS: Final = (dict, list)
_BYTES_PER_VALUE: Final = 64  # of text, which take as long as one value
_MANY_BYTES: Final = 2**20  # of values with their weight: 16,000 floats take 20 ms
_MAX_VALUES: Final = 2**18  # parsing so many lists takes about 30 ms, during which no other thread runs


def size_of(values: Iterable[Any], most: int) -> int:
    """Return the approximate bytes of JSON values, which take as long to read; above `most` it stops counting."""
    size = 0
    pending = list(values)
    while pending and size <= most:
        value = pending.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, _CONTAINERS):
            size += _BYTES_PER_VALUE * len(value)
            if size <= most:
                pending.extend(value.values() if isinstance(value, dict) else value)
    return size


def write_python(value: Any, encoder: json.JSONEncoder) -> str:
    """Return a value as Python's own JSON.

    Many values are written one by one: for a million floats, one call in C takes more than a second, while no thread runs.
    Raises RecursionError if it is nested too deeply.
    """
    return "".join(encoder.iterencode(value)) if size_of([value], _MANY_BYTES) > _MANY_BYTES else encoder.encode(value)


def parse_text(text: str, loads: Callable[[str], Any] = orjson.loads) -> Any:
    """Return the JSON value in a text that an agent or a model wrote, such as the arguments of a call.

    The limits of a body do not count the values in its texts, so they are limited here. Raises ValueError if the text is
    not JSON, or may have too many values.
    """
    if len(text) > _MAX_VALUES and sum(map(text.count, "[{,")) > _MAX_VALUES:
        raise ValueError("the JSON in a text has too many values")
    return loads(text)


def to_json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON, of any depth; bytes as base64.

    Raises TypeError if JSON cannot represent the value.
    """
    if isinstance(value, bytes):
        return orjson.dumps(b64encode(value).decode())
    try:
        return orjson.dumps(value)
    except TypeError:
        if isinstance(value, dict):
            return orjson.dumps({name: orjson.Fragment(to_json_bytes(inner)) for name, inner in value.items()})
        if isinstance(value, list | tuple):
            return orjson.dumps([orjson.Fragment(to_json_bytes(inner)) for inner in value])
        raise
