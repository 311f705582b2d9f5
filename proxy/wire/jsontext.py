"""Reading an engine's JSON, the strict way first.

Holds the one place where JSON that orjson refuses is still read: Python engines may write NaN, Infinity or lone
surrogates. Clients' bodies are not read here: they must be JSON.
"""

import json
from typing import Any

import orjson


class NotJson(ValueError):
    """The bytes are no JSON, not even loosely."""


def read_json(text: bytes) -> tuple[Any, bool]:
    """The value, and whether it was read loosely (it held NaN, an infinity or a lone surrogate).

    A lone surrogate becomes "?", so that the value can be written again.
    """
    try:
        return orjson.loads(text), False
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(text)  # noqa: TID251 - the loose reading that orjson does not offer
        spelled = json.dumps(value, ensure_ascii=False)  # noqa: TID251
        return json.loads(spelled.encode("utf-8", "replace")), True  # noqa: TID251
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def write_json(value: Any, *, loosely: bool) -> bytes:
    """Compact JSON, as vLLM and SGLang write it; `loosely` keeps NaN and the infinities as Python spells them."""
    if loosely:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()  # noqa: TID251
    return orjson.dumps(value)
