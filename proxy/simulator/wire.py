"""What answers share on the wire.

Holds the head and the usage of an answer, its server-sent events, and the protocol by which the server writes
any kind; it must not hold what only one of them has. Key order and null keys are those of vLLM 0.32's
answers, which SGLang shares where it uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from proxy.simulator.distribution import Prefix
from proxy.simulator.generation import Token
from proxy.simulator.model import Manner

DONE: Final = b"data: [DONE]\n\n"

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """What begins every answer and chunk; `created_s` is unix seconds."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def keys(self, kind: str) -> Answer:
        """The first keys of an answer of this kind."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


class Reply(Protocol):
    """An answer in the making. `engine` asks for it whole, or token by token."""

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """For each prompt, what the model sees of it, and how its replies shall go."""
        ...

    def opening(self) -> list[bytes]:
        """The events before the first token."""
        ...

    def events(self, index: int, token: Token) -> list[bytes]:
        """The events of one token of one choice; none if the engine would send none."""
        ...

    def closing(self) -> list[bytes]:
        """The events after the last token."""
        ...

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer | list[Answer]:
        """The answer that is not streamed."""
        ...


def event(answer: Answer) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + orjson.dumps(answer) + b"\n\n"


def named_event(name: bytes, answer: Answer) -> bytes:
    """A chunk as a server-sent event that has a name."""
    return b"event: " + name + b"\n" + event(answer)


def usage(prompt_tokens: int, completion_tokens: int, **details: Any) -> Answer:
    """The usage of an answer; `details` are the keys that only some answers have."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        **details,
    }
