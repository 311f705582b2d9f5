"""Compact JSON of any depth.

orjson (3.11) writes at most 254 levels. A request of that depth is recorded, and is deeper yet as part of a row or of a
response: without this, one rollout could make an export of all rollouts fail.
"""

from typing import Any

import orjson


def to_json_bytes(value: Any) -> bytes:
    """Write a value as compact JSON. Raises `TypeError` for what JSON cannot express, never for its depth."""
    try:
        return orjson.dumps(value)
    except TypeError:
        if isinstance(value, dict):
            return orjson.dumps({name: orjson.Fragment(to_json_bytes(inner)) for name, inner in value.items()})
        if isinstance(value, list | tuple):
            return orjson.dumps([orjson.Fragment(to_json_bytes(inner)) for inner in value])
        raise
