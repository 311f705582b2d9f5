"""What every engine answers: ask, hide, tokens.

Holds the `Engine` protocol and the values it gives. `ask` and `hide` are a pair: what `ask` adds, `hide` takes away
again, so that the client sees what it would see without us. Nothing here changes a body or a response it was given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.dialects.base import Asked, DialectName

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the client did not ask for and must not see.

    `empty_deltas`: drop stream events that exist only because ids or logprobs were asked. `reasoning`: the client
    switched reasoning off, but the engine was asked for it because it would have withheld the ids as well.
    """

    token_ids: bool = False
    logprobs: bool = False
    empty_deltas: bool = False
    reasoning: bool = False

    @property
    def anything(self) -> bool:
        """Whether there is anything to hide at all."""
        return self.token_ids or self.logprobs or self.empty_deltas or self.reasoning


@dataclass(frozen=True, slots=True)
class Ask:
    """What to send: fields to set in the client's body, what to hide of the answer, and problems known beforehand.

    `problems` are codes of `proxy.trajectory.fidelity.PROBLEMS`.
    """

    fields: Mapping[str, Any]
    hidden: Hidden
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One choice as the engine gave it: lists of the response itself, not copies. None: not given."""

    index: int
    prompt_ids: list[int] | None
    ids: list[int] | None
    logprobs: list[float | None] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a whole response. `prompt_ids` is the prompt that all choices share, where the engine says it once."""

    prompt_ids: list[int] | None
    choices: tuple[Sampled, ...]


class Engine(Protocol):
    """One kind of inference server."""

    kind: str

    def ask(self, dialect: DialectName, body: Mapping[str, Any], asked: Asked, *, keep_reasoning: bool) -> Ask:
        """What to add to the client's body so that ids and logprobs come.

        `keep_reasoning`: whether a client's wish for no reasoning may be overridden where it would cost the ids.
        """
        ...

    def hide(self, dialect: DialectName, response: Json, hidden: Hidden) -> Json:
        """An unstreamed (or folded) response without what the client did not ask for; a new dict if that differs."""
        ...

    def hide_chunk(self, dialect: DialectName, chunk: Json, hidden: Hidden) -> Json | None:
        """A streamed chunk likewise; the same dict if nothing in it is to be hidden, None if it is not to be shown."""
        ...

    def tokens(self, dialect: DialectName, response: Json) -> Tokens:
        """Where the tokens are in an unstreamed (or folded) response."""
        ...
