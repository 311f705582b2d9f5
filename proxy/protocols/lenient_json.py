"""Reading and writing an engine's JSON, strictly first.

Python engines may write NaN, Infinity, lone surrogates or numbers beyond a double. orjson refuses these; they are read
here and written again as they came. Clients' bodies are not read here: they must be JSON.
"""

import json
import re
from math import isfinite
from typing import Any, Final

import orjson

# A number beyond a double is kept as this and its literal, in a string: as a float it would be written as `Infinity`.
_OVERFLOW: Final = "\ue000overflow:"
_WRITTEN_OVERFLOW: Final = re.compile(f'"{_OVERFLOW}([-+.0-9eE]+)"')


class NotJson(ValueError):
    """The bytes are no JSON, not even as Python writes it."""


def read_json(text: bytes) -> tuple[Any, bool]:
    """Return the value, and whether it is loose: it has NaN, an infinity, a lone surrogate or a number beyond a double.

    A lone surrogate becomes "?". A number beyond a double becomes a string, which no reader takes for a number;
    `write_loosely` writes its literal. Raises NotJson.
    """
    try:
        return orjson.loads(text), False
    except orjson.JSONDecodeError:
        pass
    try:
        spelled = json.dumps(_loads(text), ensure_ascii=False)  # noqa: TID251
        return _loads(spelled.encode("utf-8", "replace")), True
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def write_loosely(value: Any) -> bytes:
    """Return compact JSON, as vLLM and SGLang write it, of a loose value; orjson writes others so.

    Raises RecursionError for a value that is nested too deeply.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # noqa: TID251
    return (_WRITTEN_OVERFLOW.sub(r"\1", text) if _OVERFLOW in text else text).encode()


def _loads(text: bytes) -> Any:
    return json.loads(text, parse_float=_number, parse_int=_integer)  # noqa: TID251 - what orjson does not read


def _number(literal: str) -> float | str:
    value = float(literal)
    return value if isfinite(value) else _OVERFLOW + literal


def _integer(literal: str) -> float | int | str:
    """Return the number as orjson reads it: an integer of 64 bits, else a float."""
    value = _number(literal)
    if isinstance(value, str) or abs(value) >= 2.0**64:
        return value
    exact = int(literal)
    return exact if -(2**63) <= exact < 2**64 else value
