"""The protocols of a dialect that is translated to chat, because no engine supports it exactly.

A request is read as a chat call, and chat chunks, as a client of chat would receive them, are rendered as the dialect's events.

Invariant: if a client sends a response back, it is read as the chat message that was sampled, as far as the dialect can
represent it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from proxy.protocols.dialects.base import ErrorDialect
from proxy.protocols.sse import StreamFormat

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TranslationOptions:
    """The configuration of a translation, and how the engine itself translates the dialect.

    `thinking` and `not_thinking` are fields of the chat body for calls that request reasoning and that disable it.

    Of the engine: `thought` is the field of a chat message with the reasoning text; `system_joint` is the separator between
    the system texts of Messages; `merges_systems`: it moves system turns between others to the beginning;
    `has_developers`: its chat accepts developer messages, and merges them into one system message if necessary.
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
    """The identity of a call: its step, its time of arrival (unix seconds), the requested model.

    `rollout_id` is part of ids that a client may use without naming the rollout.
    """

    step_id: str
    created_s: int
    model: str
    rollout_id: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedReferences:
    """The resolved references of a call.

    `messages` are the chat messages before its own, `items` those that it names, and `calls` the sampled functions of earlier
    tool calls by call id (`name` and `arguments`), whose argument text a client's copy cannot carry.
    """

    messages: Sequence[Json] = ()
    items: Mapping[str, Json] = field(default_factory=dict)
    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


NO_REFERENCES: Final = ResolvedReferences()


@dataclass(frozen=True, slots=True)
class References:
    """What a call refers to by id: the previous response, items, and tool calls."""

    previous_response: str | None = None
    items: Sequence[str] = ()
    calls: Sequence[str] = ()


class ResponseRenderer(Protocol):
    """Renders one response in the dialect. Either feed chunks and finish, or render it whole; never both.

    Chunks and responses are those of a chat client that requested usage in its stream (and logprobs, if the translated body
    does). They may be split in any way that engines use: several fields in one delta, a finish reason beside text, empty
    deltas, tool calls by index.
    """

    stream_format: StreamFormat

    def feed(self, chunk: Json) -> bytes:
        """Return the events of this chunk, possibly none."""
        ...

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the events that end the stream.

        `response` is the accumulated chat response (None: there was none); `error` is the text of the engine's error event, or
        the reason of a disconnection.
        """
        ...

    def whole(self, response: Json) -> Json:
        """Render an unstreamed response."""
        ...


class Translator(ErrorDialect, Protocol):
    """A dialect that is translated to chat. `has_system_turns`: its conversations may have system messages between turns."""

    has_system_turns: bool = False

    def read(
        self, body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = NO_REFERENCES
    ) -> Json:
        """Return the chat body for an engine; `body` remains unchanged.

        Raises UnprocessableRequest, naming the field, for what chat cannot represent.
        """
        ...

    def references(self, body: Mapping[str, Any]) -> References:
        """Return what this body refers to by id."""
        ...

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> ResponseRenderer:
        """Return the renderer of the response to this body (the client's own)."""
        ...

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the error body for an engine's error: the engine's message in the dialect's format."""
        ...

    def is_spoken(self, endpoint: str, headers: Mapping[str, str]) -> bool:
        """Return whether a request that samples nothing is of this dialect, and not of OpenAI's."""
        return False

    def models(self, entries: Sequence[Json]) -> Json:
        """Return OpenAI's entries of models in the dialect's format, all on one page."""
        return {"object": "list", "data": entries}

    def model(self, entry: Json) -> Json:
        """Return OpenAI's entry of a model in the dialect's format."""
        return entry
