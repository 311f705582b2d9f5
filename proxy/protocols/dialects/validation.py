"""Type checks for the values of a request body; an invalid value is refused with its path.

A path has Anthropic's format: `messages.0.content.1.text`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.errors import InvalidValue
from proxy.protocols.dialects.translation import Json


def refusal(path: str, sentence: str) -> InvalidValue:
    """Return the error for the value at this path."""
    return InvalidValue(f"{path}: {sentence}", param=path)


def a_text(value: Any, path: str) -> str:
    """Return the value if it is a string."""
    if not isinstance(value, str):
        raise refusal(path, f"must be a string, not {_kind(value)}")
    return value


def a_list(value: Any, path: str) -> list[Any]:
    """Return the value if it is a list."""
    if not isinstance(value, list):
        raise refusal(path, f"must be a list, not {_kind(value)}")
    return value


def an_object(value: Any, path: str) -> Json:
    """Return the value if it is an object."""
    if not isinstance(value, dict):
        raise refusal(path, f"must be an object, not {_kind(value)}")
    return value


def a_number(value: Any, path: str) -> int | float:
    """Return the value if it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(path, f"must be a number, not {_kind(value)}")
    return value


def a_count(value: Any, path: str) -> int:
    """Return the value if it is an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise refusal(path, f"must be an integer, not {_kind(value)}")
    return value


def a_flag(value: Any, path: str) -> bool:
    """Return the value if it is a boolean."""
    if not isinstance(value, bool):
        raise refusal(path, f"must be true or false, not {_kind(value)}")
    return value


def one_of(value: Any, path: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the value if it is one of these strings."""
    text = a_text(value, path)
    if text not in known:
        raise refusal(path, f"must be one of {', '.join(known)}, not {text[:64]!r}")
    return text


def _kind(value: Any) -> str:
    """Return the value's JSON type."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
