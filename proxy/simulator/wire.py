"""What all responses share: id and model, usage, server-sent events, and the protocol that `engine` sends them by.

The order of keys and the null values are vLLM 0.32's; SGLang 0.5.23 has the same where it uses these functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from proxy.simulator.distribution import Prefix
from proxy.simulator.generation import Token
from proxy.simulator.model import GenerationOptions

DONE: Final = b"data: [DONE]\n\n"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """The values at the start of every response and chunk; `created_s` is Unix seconds."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def keys(self, kind: str) -> JsonObject:
        """Return the first keys of a response whose `object` is `kind`."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


class Response(Protocol):
    """A response that `engine` builds in full, or streams token by token."""

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The prompts, each with the options of its choices."""
        ...

    def opening_events(self) -> list[bytes]:
        """Return the events before the first token."""
        ...

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the events of one token of one choice; none if the engine sends none."""
        ...

    def closing_events(self) -> list[bytes]:
        """Return the events after the last token."""
        ...

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject | list[JsonObject]:
        """Return the body of the response that is not streamed."""
        ...


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
