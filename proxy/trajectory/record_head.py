"""The head of a record as typed values.

It is read from its JSON in one pass. Imported records may have any values: one of another type that a step can do without is
dropped, and most of these flag the step.
"""

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Annotated, Any, Final, Literal

import orjson
from msgspec import DecodeError, Meta, Struct, convert
from msgspec.json import Decoder

from proxy.trajectory.step import DEFAULT_POLICY, Dialect, EngineFacts, Span, Status, Timing

ODD: Final = "unparsed_event"
LATEST_S: Final = 2**38  # later than any call; its milliseconds are an integer that JSON writers accept
_EXTRA_TYPES: Final[Mapping[str, type[Any]]] = {"request_key": str, "retry_of": str, "attempt": int, "mask_claim": int}
_LARGEST: Final = 2**63 - 1
_DIGITS: Final = 20  # of the largest integer of 64 bits, and of the smallest one with its sign
_LONG_INTEGER: Final = re.compile(rb"-?[0-9]{19,}")  # also in a string or a fraction: then the slower reader decides
_ZEROS: Final = b"0" * 19
_AS_ZEROS: Final = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_JSON_INTEGERS: Final = range(-(2**63), 2**64)  # orjson reads others as floats, and writes none

_Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
_TokenId = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]


class PromptHead(Struct, gc=False):
    """A prompt."""

    end: str  # the name of the last block of its chain in hex
    tail: _Count  # the number of bytes after that chain


class ChoiceHead(Struct):
    """A choice, with the numbers of its ids and logprobs."""

    index: _TokenId
    prompt: _TokenId
    finish_reason: str | None
    stop_reason: _TokenId | str | None
    spans: tuple[Span, ...]
    ids: _Count
    logprobs: _Count
    code: Literal["f", "d"]  # the type of the logprobs
    experts: list[Any] | None  # their form and number of bytes
    mask: list[Any] | None  # the numbers of its ids and offsets


class Head(Struct):
    """The head: facts of a step, its prompts and choices, and where the JSON of request and response continues."""

    step_id: str
    rollout_id: str
    dialect: Dialect
    endpoint: str
    engine: EngineFacts
    model_asked: str | None
    model_served: str | None
    usage: dict[str, Any] | None
    sampling: dict[str, Any] | None
    timing: Timing
    status: Status
    reason: str | None
    delivered: bool
    policy_version: str | None
    policy_version_end: str | None
    problems: tuple[str, ...]
    extra: dict[str, Any] | None
    prompts: list[PromptHead]
    choices: list[ChoiceHead]
    chains: dict[str, dict[str, list[str]]]
    again: list[list[Any]]
    policy: str = DEFAULT_POLICY


class _Sent(Struct):
    set: dict[str, Any] | None = None
    unset: list[str] | None = None


_HEADS: Final = Decoder(Head)


def read_head(text: bytes) -> Head:
    """Return the head in this JSON.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: A required value is missing or has another type.
    """
    head = _in_one_pass(text)
    return _repaired(orjson.loads(text)) if head is None else head


def flagged(problems: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
    """Return the problems with the found ones that are not among them."""
    return (*problems, *(code for code in found if code not in problems))


def object_of(value: Any) -> dict[str, Any]:
    """Return a required object. Raises TypeError."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return value


def sent_of(value: Any) -> dict[str, Any]:
    """Return the changes of a request: an object `set` and a list of names `unset`, where it has them.

    Raises:
        ValueError, TypeError: They have another type.
    """
    convert(value, _Sent)
    return object_of(value)


def _in_one_pass(text: bytes) -> Head | None:
    """Return the head; None if a value has another type, or is out of range."""
    try:
        head = _HEADS.decode(text)
    except (DecodeError, RecursionError):
        return None
    timing = head.timing
    for time in (timing.received, timing.sent, timing.first_byte, timing.last_byte, timing.stored):
        if time is not None and abs(time) >= LATEST_S:
            return None
    if _ZEROS in text.translate(_AS_ZEROS) and _has_long_integer(text):  # a fiftieth of the time of the search
        return None
    for name, value in (head.extra or {}).items():
        if type(value) is not _EXTRA_TYPES.get(name, type(value)):
            return None
    for choice in head.choices:
        for span in choice.spans or ():
            if not (0 <= span.start <= span.end <= choice.ids and 0 <= span.epoch <= _LARGEST):
                return None
    return head


def _has_long_integer(text: bytes) -> bool:
    found = _LONG_INTEGER.findall(text)
    return any(len(digits) > _DIGITS or int(digits) not in _JSON_INTEGERS for digits in found)


def _repaired(given: Any) -> Head:
    """Return the head of these values, which `_in_one_pass` refuses."""
    odd: dict[str, None] = {}  # problems
    head = dict(given)
    head |= {name: _kept(head[name], str, odd) for name in ("model_asked", "model_served", "reason")}
    head |= {name: _kept(head[name], dict, odd) for name in ("usage", "sampling", "extra")}
    head |= {name: _version(head[name], odd) for name in ("policy_version", "policy_version_end")}
    extra = head["extra"] or {}
    head["extra"] = {name: value for name, value in extra.items() if type(value) is _EXTRA_TYPES.get(name, type(value))}
    head["engine"] = {**head["engine"], "version": _kept(head["engine"]["version"], str, odd)}
    head["timing"] = {name: _time(value) for name, value in head["timing"].items()}
    head["choices"] = [_choice(choice, odd) for choice in head["choices"]]
    found = convert(head, Head)
    found.problems = flagged(found.problems, odd)
    return found


def _kept(value: Any, kind: type[Any], odd: dict[str, None]) -> Any:
    if value is None or type(value) is kind:
        return value
    odd[ODD] = None
    return None


def _version(value: Any, odd: dict[str, None]) -> Any:
    return str(value) if type(value) is int else _kept(value, str, odd)


def _choice(value: Any, odd: dict[str, None]) -> dict[str, Any]:
    finish, stop, ids = _kept(value["finish_reason"], str, odd), value["stop_reason"], value["ids"]
    if type(stop) is not int or abs(stop) > _LARGEST:
        stop = _kept(stop, str, odd)
    given = value["spans"] or []
    spans = [_span(span, odd) for span in given] if isinstance(given, list) else [None]
    if not all(span is not None and 0 <= span["start"] <= span["end"] <= ids for span in spans):
        odd["version_spans"], spans = None, []
    return {**value, "finish_reason": finish, "stop_reason": stop, "spans": spans}


def _span(value: Any, odd: dict[str, None]) -> dict[str, Any] | None:
    start, end = (value.get("start"), value.get("end")) if isinstance(value, dict) else (None, None)
    if type(start) is not int or type(end) is not int:
        return None
    epoch = value.get("epoch", 0)
    if type(epoch) is not int or not 0 <= epoch <= _LARGEST:
        odd[ODD], epoch = None, 0
    return {"start": start, "end": end, "policy_version": _version(value.get("policy_version"), odd), "epoch": epoch}


def _time(value: Any) -> float | None:
    is_time = type(value) in (int, float) and isfinite(value) and abs(value) < LATEST_S
    return value if is_time else None
