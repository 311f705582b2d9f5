"""The head of a record as typed values, read from its JSON in one pass.

`read_head` returns None if a value does not have the type that is declared here. `record_values.Typed.head` then reads the head
value by value, and drops and flags what it can. Where `read_head` returns a head, `Typed.head` returns an equal one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from proxy.trajectory.step import DEFAULT_POLICY, Dialect, EngineFacts, Span, Status, Timing

EXTRA_TYPES: Final[Mapping[str, type[Any]]] = {"request_key": str, "retry_of": str, "attempt": int, "mask_claim": int}
LARGEST: Final = 2**63 - 1

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

    index: int
    prompt: int
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


def read_head(text: bytes) -> Head | None:
    """Return the head in this JSON; None if a value has another type, or a span is out of range."""
    try:
        head = _HEADS.decode(text)
    except DecodeError:
        return None
    for name, value in (head.extra or {}).items():
        if type(value) is not EXTRA_TYPES.get(name, type(value)):
            return None
    for choice in head.choices:
        for span in choice.spans or ():
            if not (0 <= span.start <= span.end <= choice.ids and 0 <= span.epoch <= LARGEST):
                return None
    return head
