"""Reading what clients send: a body must be a JSON object that we can carry without changing it.

Holds the reading of request bodies and the refusals it may end in. It looks at shape only; what the fields mean is the
dialects' and the engine's business.
"""

import re
from typing import Any

import orjson

from proxy.errors import BadCall

MAX_DEPTH = 200  # orjson writes 254 levels; records and answers of ours wrap a body in a few
_FIRST_INEXACT = 2.0**63
_LONG_INTEGER = re.compile(rb"(?<![\d.eE+-])-?\d{19,}(?![\d.eE])")


def read_body(text: bytes) -> dict[str, Any]:
    """The body as a dict. Of duplicate keys the last one counts, as it does to engines. Raises BadCall."""
    if not text:
        raise BadCall("the body is empty; it must be a JSON object")
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadCall(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadCall(f"the body must be a JSON object, not {_kind(body)}")
    if _has_inexact(body) and (found := _long_integer(text)) is not None:
        raise BadCall(
            f"the integer {found} does not fit into 64 bits and would be changed on the way; send it as a string"
        )
    return body


def _has_inexact(body: dict[str, Any]) -> bool:
    """Whether a float is so large that it may have been an integer. Raises BadCall for too deep a body."""
    level: list[Any] = [body]
    found = False
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value if set(map(type, value)) - {int, str} else ())
            elif type(value) is float and abs(value) >= _FIRST_INEXACT:
                found = True  # and on: how deep the body goes is still to be seen
        if not below:
            return found
        level = below
    raise BadCall(f"the body is nested deeper than {MAX_DEPTH} levels")


def _long_integer(text: bytes) -> str | None:
    """The first integer literal beyond 64 bits, if there is one (a float such as 1e30 is none)."""
    unquoted = re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', text)
    for match in _LONG_INTEGER.finditer(unquoted):
        if not -(2**63) <= int(match[0]) < 2**64:
            return match[0].decode()
    return None


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
