"""Type checks for the fields of a request body: a field has the right type, is absent, or is refused by name.

Null counts as absent, as the SDK's types allow it nearly everywhere.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from proxy.errors import BadRequest, InvalidValue
from proxy.protocols.dialects.translation import Json

_WORDS: Final = {
    str: "a string", bool: "true or false", int: "an integer", float: "a number", dict: "an object", list: "a list",
    type(None): "null",
}  # fmt: skip

Kind = TypeVar("Kind")


def optional(body: Mapping[str, Any], name: str, kind: type[Kind], path: str = "") -> Kind | None:
    """Return the field if it has this type, None if it is absent. `path` is the body's path, such as `input[0]`."""
    value = body.get(name)
    if value is None or type(value) is kind or (kind is float and type(value) is int):
        return cast("Kind | None", value)
    raise wrong(f"{path}.{name}" if path else name, _WORDS[kind], value)


def required(body: Mapping[str, Any], name: str, kind: type[Kind], path: str = "") -> Kind:
    """Return the field, which must be present."""
    value = optional(body, name, kind, path)
    if value is None:
        raise wrong(f"{path}.{name}" if path else name, _WORDS[kind], None)
    return value


def objects(value: list[Any], path: str) -> list[Json]:
    """Return the list, each entry of which must be an object."""
    for number, entry in enumerate(value):
        if type(entry) is not dict:
            raise wrong(f"{path}[{number}]", "an object", entry)
    return value


def strings(value: list[Any], path: str) -> list[str]:
    """Return the list, each entry of which must be a string."""
    for number, entry in enumerate(value):
        if type(entry) is not str:
            raise wrong(f"{path}[{number}]", "a string", entry)
    return value


def wrong(param: str, expected: str, value: object) -> InvalidValue:
    """Return the error for a value of the wrong type."""
    return InvalidValue(f"{param} must be {expected}, not {_WORDS[type(value)]}", param=param)


def unknown(param: str, value: str, known: str) -> InvalidValue:
    """Return the error for an unknown value."""
    return InvalidValue(f"{param} cannot be {value[:100]!r}: {known}", param=param)


def refused(param: str, message: str) -> BadRequest:
    """Return the error for a part of the dialect that is not supported."""
    return BadRequest(message, param=param)
