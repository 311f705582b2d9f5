"""Reading fields of bodies that anybody may have written: of the right type, absent, or refused by name.

Holds readings and refusals that the other modules share. It must not know what a field means. Null is taken as absent, as the
SDK's types allow it nearly everywhere.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from proxy.errors import BadCall, NotValid
from proxy.protocols.dialects.translation import Json

_WORDS: Final = {
    str: "a string", bool: "true or false", int: "an integer", float: "a number", dict: "an object", list: "a list",
    type(None): "null",
}  # fmt: skip

Kind = TypeVar("Kind")


def optional(body: Mapping[str, Any], name: str, kind: type[Kind], at: str = "") -> Kind | None:
    """The field if it is of this type, None if it is absent. `at` is where the body stands, as `input[0]`."""
    value = body.get(name)
    if value is None or type(value) is kind or (kind is float and type(value) is int):
        return cast("Kind | None", value)
    raise wrong(f"{at}.{name}" if at else name, _WORDS[kind], value)


def required(body: Mapping[str, Any], name: str, kind: type[Kind], at: str = "") -> Kind:
    """The field, which must be there."""
    value = optional(body, name, kind, at)
    if value is None:
        raise wrong(f"{at}.{name}" if at else name, _WORDS[kind], None)
    return value


def objects(value: list[Any], at: str) -> list[Json]:
    """The list, each entry of which must be an object."""
    for number, entry in enumerate(value):
        if type(entry) is not dict:
            raise wrong(f"{at}[{number}]", "an object", entry)
    return value


def strings(value: list[Any], at: str) -> list[str]:
    """The list, each entry of which must be a string."""
    for number, entry in enumerate(value):
        if type(entry) is not str:
            raise wrong(f"{at}[{number}]", "a string", entry)
    return value


def wrong(param: str, wanted: str, value: object) -> NotValid:
    """A value of the wrong type."""
    return NotValid(f"{param} must be {wanted}, not {_WORDS[type(value)]}", param=param)


def unknown(param: str, value: str, known: str) -> NotValid:
    """A word that is none of those which may stand here."""
    return NotValid(f"{param} cannot be {value[:100]!r}: {known}", param=param)


def refused(param: str, why: str) -> BadCall:
    """Something of the dialect that is not served, however it is spelt."""
    return BadCall(why, param=param)
