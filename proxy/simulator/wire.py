"""What all responses share: id and model, usage, server-sent events, weights and experts, and the base
classes of responses.

The order of keys and the null values are vLLM 0.32's; SGLang 0.5.23 has the same where it uses these functions. The
simulated model never changes with the label of the weights, and has no experts.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import Any, Final

import orjson

from proxy.simulator.model import Model, Token
from proxy.simulator.options import Options
from proxy.simulator.parser import Delta, ParsedReply, StreamParser, parse
from proxy.simulator.prompts import Prompt
from proxy.simulator.requests import ChatRequest, CommonFields
from proxy.simulator.sampler import Prefix, mix

LAYERS: Final = 2
EXPERTS_PER_TOKEN: Final = 2
_EXPERTS: Final = 8


@dataclass(slots=True)
class Weights:
    """The label of the current weights, and how many times the calls in flight have been aborted."""

    version: str = "default"
    aborts: int = 0


@dataclass(slots=True)
class WeightVersions:
    """The weight versions of one call.

    All choices of a call sample one token per round, so a position has the same version in every choice.
    """

    _starts: list[tuple[int, str]] = field(default_factory=list)

    def record(self, position: int, version: str) -> None:
        """Record that this version samples the tokens from this position on."""
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((position, version))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """Return `weight_versions` of a choice of this length: spans of output positions, in both engines' form."""
        ends: Sequence[int] = [start for start, _ in self._starts[1:]] + [length]
        return [
            {"version": version, "start": start, "end": min(end, length)}
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < length
        ]


def experts_as_npy(ids: Sequence[int]) -> str:
    """Return routed experts as vLLM 0.32 does: base64 of a .npy array (tokens - 1, layers, experts per token)."""
    shape = (max(len(ids) - 1, 0), LAYERS, EXPERTS_PER_TOKEN)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(-(-(10 + len(header) + 1) // 64) * 64 - 11) + "\n"  # the array begins at a multiple of 64
    return b64encode(b"\x93NUMPY\x01\x00" + pack("<H", len(padded)) + padded.encode() + _int32(ids)).decode()


def experts_as_int32(ids: Sequence[int], start: int = 0) -> str:
    """Return routed experts as SGLang 0.5.23 does: base64 of int32 numbers in the same order, without a header."""
    raw = _int32(ids)
    return b64encode(raw[start * len(raw) // max(1, len(ids) - 1) :]).decode()


def _int32(ids: Sequence[int]) -> bytes:
    experts = list(_experts(ids))
    return pack(f"<{len(experts)}i", *experts)


def _experts(ids: Sequence[int]) -> Iterator[int]:
    """Yield the experts of each token but the last, which is sampled but never fed to the model."""
    prefix = Prefix()
    for token in ids[:-1]:
        prefix = prefix.with_token(token)
        bits = mix(prefix.hash)
        for slot in range(LAYERS * EXPERTS_PER_TOKEN):
            yield (bits >> 3 * slot) % _EXPERTS


DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = "vllm-0.32.0-simulator"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """The values at the start of every response and chunk; `created_s` is Unix seconds."""

    id: str
    created_s: int
    model: str

    def keys(self, kind: str) -> JsonObject:
        """Return the first keys of a response; `kind` is its `object`."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(slots=True)
class Response:
    """A response that `engine` builds in full, or streams token by token. Choice `i` belongs to prompt `i // n`."""

    model: Model
    options: Options
    common: CommonFields
    head: Head
    prompts: Sequence[Prompt]
    ids: list[list[int]] = field(init=False)  # of the tokens of each choice that are streamed

    def __post_init__(self) -> None:
        self.ids = [[] for _ in range(len(self.prompts) * self.common.choices)]

    @property
    def prompt(self) -> Prompt:
        """The first prompt."""
        return self.prompts[0]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def streamed(self) -> int:
        """The number of tokens that are streamed."""
        return sum(map(len, self.ids))

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.common.choices]

    def opening_events(self) -> list[bytes]:
        """Return the events before the first token."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the events of one token of one choice; none if the engine sends none."""
        raise NotImplementedError

    def closing_events(self) -> list[bytes]:
        """Return the events after the last token."""
        return []

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject | list[JsonObject]:
        """Return the body of the response that is not streamed."""
        raise NotImplementedError


@dataclass(slots=True)
class ChatReply(Response):
    """A chat completion of either engine: the parsers of its choices. `new_call_id` makes the ids of tool calls."""

    chat: ChatRequest
    new_call_id: Callable[[], str]
    with_calls: set[int] = field(init=False, default_factory=set)  # the streamed choices that have a tool call
    _parsers: list[StreamParser] = field(init=False)

    def __post_init__(self) -> None:
        Response.__post_init__(self)
        is_open, blocks = self.prompt.options.reasoning_open, self.prompt.call_blocks
        self._parsers = [
            StreamParser(reasoning=self.reasons, tools=self.calls, reasoning_open=is_open, blocks=blocks)
            for _ in self.ids
        ]

    @property
    def reasons(self) -> bool:
        """Whether replies begin with reasoning that is parsed."""
        return self.options.has_parser and self.prompt.options.reasoning

    @property
    def calls(self) -> bool:
        """Whether tool calls are parsed."""
        return self.options.has_parser and bool(self.chat.functions)

    def parsed(self, tokens: Sequence[Token]) -> ParsedReply:
        """Return a complete reply."""
        text = "".join(token.text for token in tokens)
        return parse(text, reasoning=self.reasons, tools=self.calls, blocks=self.prompt.call_blocks)

    def feed(self, index: int, token: Token) -> Delta:
        """Return what a token adds to a streamed reply."""
        self.ids[index].append(token.id)
        delta = self._parsers[index].feed(token.text, ended=token.finish_reason is not None)
        if delta.calls:
            self.with_calls.add(index)
        return delta


def event(payload: JsonObject) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(name: bytes, payload: JsonObject) -> bytes:
    """Return a chunk as a server-sent event with an `event` field."""
    return b"event: " + name + b"\n" + event(payload)


def usage(prompt_tokens: int, completion_tokens: int, **details: Any) -> JsonObject:
    """Return `usage`; `details` are the keys that only some responses have."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        **details,
    }
