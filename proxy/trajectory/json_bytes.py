"""Compact JSON of any depth.

orjson (3.11) writes at most 254 levels. A recorded request of that depth is deeper as part of a row or a response:
without this module, one rollout could make an export of all rollouts fail.
"""

from typing import Any

import orjson


def to_json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON, of any depth.

    Raises:
        TypeError: JSON cannot represent the value.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        if isinstance(value, dict):
            return orjson.dumps({name: orjson.Fragment(to_json_bytes(inner)) for name, inner in value.items()})
        if isinstance(value, list | tuple):
            return orjson.dumps([orjson.Fragment(to_json_bytes(inner)) for inner in value])
        raise
