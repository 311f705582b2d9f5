"""Type checks for the values of a request body; an invalid value is refused with its path.

A check takes a value and its path, in the notation of the dialect (`messages.0.content`, `input[0].content`), and returns the
value. Null counts as absent.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar

from proxy.errors import InvalidValue
from proxy.protocols.dialects.base import Json

T = TypeVar("T")
Check: TypeAlias = Callable[[Any, str], T]

_NAMES: Final = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list",
    dict: "an object",
}  # fmt: skip


def refusal(path: str, sentence: str) -> InvalidValue:
    """Return the error for the value at this path."""
    return InvalidValue(f"{path}: {sentence}", param=path)


def wrong(path: str, expected: str, value: Any) -> InvalidValue:
    """Return the error for a value of another type than expected."""
    return refusal(path, f"must be {expected}, not {_NAMES[type(value)]}")


def unknown(path: str, value: str, known: str) -> InvalidValue:
    """Return the error for an unknown value; `known` is what to use."""
    return InvalidValue(f"{path} cannot be {value[:100]!r}: {known}", param=path)


def _of(expected: str, *types: type) -> Check[Any]:
    def check(value: Any, path: str) -> Any:
        if type(value) not in types:
            raise wrong(path, expected, value)
        return value

    return check


a_text: Final[Check[str]] = _of("a string", str)
a_list: Final[Check[list[Any]]] = _of("a list", list)
an_object: Final[Check[Json]] = _of("an object", dict)
a_number: Final[Check[int | float]] = _of("a number", int, float)
a_count: Final[Check[int]] = _of("an integer", int)
a_flag: Final[Check[bool]] = _of("true or false", bool)


def one_of(value: Any, path: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the value if it is one of these strings."""
    text = a_text(value, path)
    if text not in known:
        raise refusal(path, f"must be one of {', '.join(known)}, not {text[:64]!r}")
    return text


def objects(value: Any, path: str) -> list[tuple[Json, str]]:
    """Return the objects of a list, each with its path."""
    return [(an_object(entry, f"{path}[{n}]"), f"{path}[{n}]") for n, entry in enumerate(a_list(value, path))]


def texts(value: Any, path: str) -> list[str]:
    """Return the strings of a list."""
    return [a_text(entry, f"{path}[{n}]") for n, entry in enumerate(a_list(value, path))]


@cache
def snake_case(name: str) -> str:
    """Return the name of a field in camelCase as in protocol buffers; other names are unchanged."""
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def at(value: Mapping[str, Any], name: str, path: str = "") -> tuple[Any, str]:
    """Return the value of a field, by either spelling of its name, and its path. Raises InvalidValue if it occurs twice."""
    field_path = f"{path}.{name}" if path else name
    found = value.get(name)
    if (other := snake_case(name)) != name and (spelled := value.get(other)) is not None:
        if found is not None:
            raise refusal(field_path, f"is present twice, also as {other}")
        found = spelled
    return found, field_path


def optional(check: Check[T], value: Mapping[str, Any], name: str, path: str = "") -> T | None:
    """Return the checked value of a field; None if it is absent. `path` is the path of the object."""
    if name.islower():  # the usual case: it has no other spelling
        found = value.get(name)
        return None if found is None else check(found, f"{path}.{name}" if path else name)
    found, field_path = at(value, name, path)
    return None if found is None else check(found, field_path)


def required(check: Check[T], value: Mapping[str, Any], name: str, path: str = "") -> T:
    """Return the checked value of a field, which must be present."""
    if name.islower():
        return check(value.get(name), f"{path}.{name}" if path else name)
    return check(*at(value, name, path))
