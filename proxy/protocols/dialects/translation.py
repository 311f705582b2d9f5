"""Dialects by way of chat: what a translation answers.

Holds the protocols of a dialect that no engine speaks exactly. Its request is read as a chat call, and chat chunks, as a
client of chat would see them, are told in its own events. It must not know engines, sockets or the store.

Law: what a client gets and sends back, read again, is the chat message that was sampled, wherever the dialect can carry it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from proxy.protocols.dialects.base import ErrorDialect

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TranslationOptions:
    """What the configuration says of translating, and what the engine at hand makes of it by itself.

    `thinking` and `not_thinking` are fields of the chat body for calls that ask for reasoning and that forbid it.

    Of the engine: `thought` is the field of a chat message that reasoning stands in; `system_joint` is what it puts between
    the texts of the Messages' systems; `merges_systems`: whether it moves systems between other turns to the beginning;
    `has_developers`: whether its chat takes messages of developers, and makes one system message of all, if it must.
    """

    thinking: Mapping[str, Any] = field(default_factory=dict)
    not_thinking: Mapping[str, Any] = field(default_factory=dict)
    ignore_hosted_tools: bool = False
    thought: str = "reasoning"
    system_joint: str = ""
    merges_systems: bool = False
    has_developers: bool = False


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """What is told of a call beside what was sampled: its step, when it came (unix seconds), the model's name as asked for.

    `rollout_id` is for ids that a client may name without naming the rollout.
    """

    step_id: str
    created_s: int
    model: str
    rollout_id: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedReferences:
    """What a call leans on by name: the chat messages before its own, and the items that it names.

    `calls` are the argument texts that were sampled before, by the id of their call, where a dialect cannot carry the text.
    """

    messages: Sequence[Json] = ()
    items: Mapping[str, Json] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class References:
    """What a call names and does not bring: the answer that it follows, items, and calls of tools, each by its id.

    Of calls the sampled argument text is wanted, as what came back cannot carry it.
    """

    answer: str | None = None
    items: Sequence[str] = ()
    calls: Sequence[str] = ()


class ResponseRenderer(Protocol):
    """One answer, told in the dialect. Either fed chunks and finished, or told whole; never both.

    Chunks and responses are chat's, as a client of chat sees them that asked for usage in its stream (and for logprobs, if
    the chat body that was read does). They may have any split that engines make: several fields in one delta, a finish
    reason beside text, empty deltas, tool calls by index.
    """

    def feed(self, chunk: Json) -> bytes:
        """The events that this chunk gives; maybe none."""
        ...

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """The events that end the stream.

        `response` is the folded chat response (None: none came); `error` is the text of an error event of the engine, or
        what broke it off.
        """
        ...

    def whole(self, response: Json) -> Json:
        """An unstreamed answer."""
        ...


class Translator(ErrorDialect, Protocol):
    """A dialect by way of chat."""

    def read(
        self, body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = ResolvedReferences()
    ) -> Json:
        """The chat body, ready for an engine; `body` stays as it is.

        Raises NotValid for what cannot be said by way of chat, naming it.
        """
        ...

    def references(self, body: Mapping[str, Any]) -> References:
        """What this body leans on by name."""
        ...

    def renderer(self, body: Mapping[str, Any], told: CallIdentity) -> ResponseRenderer:
        """How the answer to this body (the client's own) is told."""
        ...

    def unrestorable_calls(
        self, body: Mapping[str, Any], told: CallIdentity, response: Mapping[str, Any]
    ) -> Mapping[str, Json]:
        """Calls of a chat response (`name`, `arguments`) whose text cannot come back by itself, by the ids they are told by."""
        ...

    def engine_error(self, status: int, text: str) -> bytes:
        """The body by which a client learns of an error that the engine answered: its own words, in the dialect's shape."""
        ...
