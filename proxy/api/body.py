"""Parsing of request bodies: JSON objects that can be forwarded without changing a value.

`_check_weight` limits memory and time before parsing, because a small text can become a very large object.
"""

import re
from typing import Any, Final

import orjson
from pydantic import FailFast, ValidationError

from proxy.errors import BadRequest, RequestTooLarge

MAX_DEPTH: Final = 200  # orjson writes 254 levels; records and answers of ours wrap a body in a few
_FIRST_INEXACT: Final = 2.0**63
_LONG_DIGITS: Final = 19  # an integer of fewer digits fits into 64 bits
_MOST_DIGITS: Final = 309  # of the greatest float; an integer literal of more was no JSON to orjson
_MOST_FIELDS: Final = 1000  # the top level of a body is copied while a call is planned
_MOST_FAULTS: Final = 1000
_OF_A_FAULT: Final = ("type", "loc", "msg", "input")
_SHORT: Final = 100
_MOST_RUNS: Final = 100_000  # which takes a tenth of a second
_DIGITS_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_DIGITS: Final = re.compile(rb"\d+")

# Bytes of memory that one character stands for while a body is parsed (orjson 3.13, CPython 3.11, x86-64, measured): its
# own 16 bytes for each value, then a dict, a list, a boxed number with its slot, and half a string or key.
_WEIGHTS: Final = {b"{": 248, b"[": 88, b",": 56}
_QUOTE_WEIGHT: Final = 40
_MOST_QUOTES: Final = 400_000  # up to so many, the text is cut at them
_FREE_WEIGHT: Final = 24 * 2**20  # of 600,000 token ids, or 40,000 short messages
_WEIGHT_PER_BYTE: Final = 2


def read_body(text: bytes) -> dict[str, Any]:
    """Return the body as a dict; the last of duplicate keys wins, as in engines. Raises BadRequest."""
    if not text:
        raise BadRequest("The request body is empty; send a JSON object.")
    _check_weight(text)
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_kind(body)}.")
    if len(body) > _MOST_FIELDS:
        raise BadRequest(f"The request body has {len(body)} fields; the maximum is {_MOST_FIELDS}.")
    inexact = _inexact(body)
    if inexact and (found := _long_integer(text, inexact)) is not None:
        raise BadRequest(
            f"Integer {found} does not fit into 64 bits and cannot be forwarded unchanged; send it as a string."
        )
    return body


class _FirstFault(FailFast):
    __hash__ = object.__hash__  # pydantic's own has none, which unions require


FIRST_FAULT: Final = _FirstFault()  # for lists in models: only the first invalid item of a long list is reported


def faults_of(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors of a body as in pydantic: type, loc, msg, input. Very many are summarized in one.

    Long inputs are left out, so that the response does not repeat the body for each error.
    """
    count = error.error_count()
    if count > _MOST_FAULTS:
        return [{"type": "too_many_faults", "loc": (), "msg": f"{count} values are invalid"}]
    faults = error.errors(include_url=False, include_context=False)
    return [
        {name: fault[name] for name in _OF_A_FAULT if name != "input" or _is_short(fault["input"])} for fault in faults
    ]


def _is_short(value: Any) -> bool:
    if isinstance(value, str | list | dict):
        return len(value) <= _SHORT and all(
            not isinstance(part, str | list | dict) or len(part) <= _SHORT
            for part in (value.values() if isinstance(value, dict) else value)
        )
    return True


def _check_weight(text: bytes) -> None:
    """Raise RequestTooLarge for a body with so many values that parsing it would take many times its length in memory.

    It takes a few passes in C: first all characters are counted, and if they are too many, those outside of strings.
    """
    most = _FREE_WEIGHT + _WEIGHT_PER_BYTE * len(text)
    if len(text) * max(_WEIGHTS.values()) <= most or _weight(text, _quotes_in(text)) <= most:
        return
    quotes = _quotes(text)
    if quotes > _MOST_QUOTES or _weight(b"".join(_unescaped(text).split(b'"')[::2]), quotes) > most:
        raise RequestTooLarge(
            f"The request body has too many JSON values for its length of {len(text)} bytes: "
            f"parsing it would take more than {most} bytes of memory. Send fewer or longer values."
        )


def _weight(text: bytes, quotes: int) -> int:
    return _QUOTE_WEIGHT * quotes + sum(weight * text.count(character) for character, weight in _WEIGHTS.items())


def _quotes_in(text: bytes) -> int:
    """Count the quotes that begin or end a string; too few where strings end in a backslash."""
    return text.count(b'"') - text.count(b'\\"')


def _unescaped(text: bytes) -> bytes:
    """Leave out escaped backslashes and quotes, so that every quote begins or ends a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _inexact(body: dict[str, Any]) -> set[float]:
    """Return the floats so large that each may have been an integer. Raises BadRequest for a body that is nested too deep."""
    level: list[Any] = [body]
    found: set[float] = set()
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value if set(map(type, value)) - {int, str} else ())
            elif type(value) is float and abs(value) >= _FIRST_INEXACT:
                found.add(value)
        if not below:
            return found
        level = below
    raise BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.")


def _long_integer(text: bytes, inexact: set[float]) -> str | None:
    """Return the first integer literal beyond 64 bits, if there is one (a float such as 1e30 is none).

    orjson gives such an integer as the nearest float, so only literals of a value in `inexact` count. Long runs of digits
    are found without a regular expression, which is slow on a large text. Raises BadRequest for too many of them.
    """
    zeros, run = text.translate(_DIGITS_AS_ZEROS), b"0" * _LONG_DIGITS
    start, checked, quotes = zeros.find(run), 0, 0
    for _ in range(_MOST_RUNS):
        if start < 0:
            return None
        end = _end_of_digits(text, start)
        literal = _integer_at(text, start, end)
        if literal is not None and not -(2**63) <= int(literal) < 2**64 and float(literal) in inexact:
            quotes += _quotes(text[checked:start])
            checked = start
            if quotes % 2 == 0:  # else these digits are part of a string
                return literal.decode()
        start = zeros.find(run, end)
    raise BadRequest(
        f"The request body has an integer beyond 64 bits and more than {_MOST_RUNS} long sequences of "
        "digits; send such integers as strings."
    )


def _quotes(text: bytes) -> int:
    return _unescaped(text).count(b'"')


def _end_of_digits(text: bytes, start: int) -> int:
    digits = _DIGITS.match(text, start)
    assert digits is not None
    return digits.end()


def _integer_at(text: bytes, start: int, end: int) -> bytes | None:
    """Return the integer literal of these digits, with its sign; None if they are a part of a float, or of a long text."""
    before, after = text[max(start - 2, 0) : start], text[end : end + 1]
    is_negative = before.endswith(b"-")
    is_part = before.endswith((b".", b"+", b"e", b"E")) or before in (b"e-", b"E-") or after in (b".", b"e", b"E")
    if is_part or end - start > _MOST_DIGITS:
        return None
    return text[start - is_negative : end]


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
