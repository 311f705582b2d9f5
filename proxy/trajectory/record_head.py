"""The head of a record as typed values, read from its JSON in one pass.

`read_head` returns None if a value does not have the type that is declared here. `record_values.Typed.head` then reads the head
value by value, and drops and flags what it can. Where `read_head` returns a head, `Typed.head` returns an equal one.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from proxy.trajectory.step import DEFAULT_POLICY, Dialect, EngineFacts, Span, Status, Timing

EXTRA_TYPES: Final[Mapping[str, type[Any]]] = {"request_key": str, "retry_of": str, "attempt": int, "mask_claim": int}
LARGEST: Final = 2**63 - 1
LATEST_S: Final = 2**38  # later than any call; its milliseconds are an integer that JSON writers accept
_DIGITS: Final = 20  # of the largest integer of 64 bits, and of the smallest one with its sign
_LONG_INTEGER: Final = re.compile(rb"-?[0-9]{19,}")
_JSON_INTEGERS: Final = range(-(2**63), 2**64)  # orjson reads others as floats, and writes none

_Count = Annotated[int, Meta(ge=0, le=LARGEST)]
_TokenId = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]


class PromptHead(Struct, gc=False):
    """A prompt: the name of the last block of its chain in hex, and the number of bytes after that chain."""

    end: str
    tail: _Count


class ChoiceHead(Struct):
    """A choice: its facts, the numbers of its ids and logprobs, and the type code of the logprobs.

    `experts` are form and number of bytes, `mask` the numbers of ids and offsets (see `experts_and_masks`).
    """

    index: _TokenId
    prompt: _TokenId
    finish_reason: str | None
    stop_reason: _TokenId | str | None
    spans: tuple[Span, ...]
    ids: _Count
    logprobs: _Count
    code: Literal["f", "d"]
    experts: list[Any] | None = None
    mask: list[Any] | None = None


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
    again: list[list[Any]] = []
    policy: str = DEFAULT_POLICY


_HEADS: Final = Decoder(Head)


def times_of(timing: Timing) -> tuple[float, ...]:
    """Return the times of a call that are known."""
    times = (timing.received, timing.sent, timing.first_byte, timing.last_byte, timing.stored)
    return tuple([time for time in times if time is not None])


def read_head(text: bytes) -> Head | None:
    """Return the head in this JSON; None if a value has another type, or a span is out of range."""
    try:
        head = _HEADS.decode(text)
    except (DecodeError, RecursionError):
        return None
    if not all(abs(time) < LATEST_S for time in times_of(head.timing)):
        return None
    if any(len(digits) > _DIGITS or int(digits) not in _JSON_INTEGERS for digits in _LONG_INTEGER.findall(text)):
        return None
    for name, value in (head.extra or {}).items():
        if type(value) is not EXTRA_TYPES.get(name, type(value)):
            return None
    for choice in head.choices:
        for span in choice.spans or ():
            if not (0 <= span.start <= span.end <= choice.ids and 0 <= span.epoch <= LARGEST):
                return None
    return head
