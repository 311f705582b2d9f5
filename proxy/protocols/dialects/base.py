"""What every dialect answers, and the few readings of a body that dialects share.

Holds the `Dialect` protocol and `Asked`. It must not know engines: what to inject is theirs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from proxy.errors import ProxyError
from proxy.protocols.accumulators import Accumulator

DialectName = Literal["chat", "completions", "generate", "messages", "responses"]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the client itself wants to see, read off its body.

    `samples` is how many choices each prompt gets and `choices` how many there are in all (prompts times samples);
    both are None when the body does not say it in a way we can rely on.
    """

    token_ids: bool
    logprobs: bool
    usage: bool
    samples: int | None
    choices: int | None


class ErrorDialect(Protocol):
    """What a client speaks, whether engines do or not."""

    name: DialectName

    def error(self, error: ProxyError) -> bytes:
        """The body by which a client of this dialect learns of a failure of ours."""
        ...

    def status(self, error: ProxyError) -> int:
        """The status by which it learns of it."""
        ...


class Dialect(ErrorDialect, Protocol):
    """One client protocol that engines speak, too."""

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """What the client wants to see."""
        ...

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a body that says how to sample."""
        ...

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """The prompts that a body gives as token ids, which the engine's are then compared with; None: it gives text."""
        ...

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """What to set on a body's top level, and to unset there, so that its `sampling` changes by these."""
        ...

    def accumulator(self) -> Accumulator:
        """A new fold for one streamed call of this dialect."""
        ...


_SPELT_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})  # to pydantic 2, by which vLLM and SGLang read bodies


def is_on(value: Any) -> bool:
    """Whether a flag of a body is on. What is neither absent, null nor false is the engine's to judge: taken as on."""
    return value.lower() not in _SPELT_FALSE if isinstance(value, str) else value not in (None, False)


def samples_of(body: Mapping[str, Any]) -> int | None:
    """How many samples each prompt gets: `n`, 1 where it is absent, None where it is no positive integer."""
    n = body.get("n")
    if n is None:
        return 1
    return n if type(n) is int and n > 0 else None


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client asked for usage within its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and is_on(options.get("include_usage"))


def openai_error(error: ProxyError) -> bytes:
    """OpenAI's error body."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )
