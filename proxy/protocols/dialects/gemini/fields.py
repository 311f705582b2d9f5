"""Access to the fields of Google's JSON, which has several spellings of the same message.

A name is written in camelCase or as in the protocol buffer (`systemInstruction`, `system_instruction`), a list with one entry
may be that entry, an enum has any case, and an integer may be written as a float. All of them are in Google's own examples.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_count, a_list, a_text, an_object, refusal

T = TypeVar("T")

_LIMIT: Final = 2**63  # of integers in JSON for an engine


@cache
def snake_case(name: str) -> str:
    """Return the name of a field in the protocol buffer."""
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def at(value: Mapping[str, Any], name: str, path: str = "") -> tuple[Any, str]:
    """Return the value of a field, None if it is absent, and its path. Raises UnprocessableRequest if it occurs twice."""
    field_path = f"{path}.{name}" if path else name
    found = value.get(name)
    if (other := snake_case(name)) != name and (spelled := value.get(other)) is not None:
        if found is not None:
            raise refusal(field_path, f"is present twice, also as {other}")
        found = spelled
    return found, field_path


def optional(check: Callable[[Any, str], T], value: Mapping[str, Any], name: str, path: str = "") -> T | None:
    """Return the checked value of a field; None if it is absent."""
    found, field_path = at(value, name, path)
    return None if found is None else check(found, field_path)


def required(check: Callable[[Any, str], T], value: Mapping[str, Any], name: str, path: str = "") -> T:
    """Return the checked value of a field, which must be present."""
    return check(*at(value, name, path))


def objects(value: Any, path: str) -> list[tuple[Json, str]]:
    """Return the objects of a list, or the one in place of it, each with its path."""
    entries = [value] if isinstance(value, dict) else a_list(value, path)
    return [(an_object(entry, f"{path}[{number}]"), f"{path}[{number}]") for number, entry in enumerate(entries)]


def texts(value: Any, path: str) -> list[str]:
    """Return the strings of a list."""
    return [a_text(entry, f"{path}[{number}]") for number, entry in enumerate(a_list(value, path))]


def an_integer(value: Any, path: str) -> int:
    """Return the value if it is an integer, also one that is written as a float (`topK: 40.0`)."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _LIMIT
    return int(value) if is_whole else a_count(value, path)


def one_of_names(value: Any, path: str, known: Mapping[str, T]) -> T:
    """Return what belongs to the name of an enum."""
    name = a_text(value, path).upper()
    if name not in known:
        raise refusal(path, f"must be one of {', '.join(known)}, not {name[:64]!r}")
    return known[name]
