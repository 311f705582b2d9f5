"""A chat response, rendered in Anthropic's format: whole, or as events.

A stream opens a block with its first piece and closes it when another begins; the block of a call is closed by `finish`, which
also sends what follows it. Accumulated, the events are the whole response.

A message with text after its calls, or reasoning after its text, keeps that order in a stream; rendered whole, it has chat's
order: reasoning, text, calls. Sent back, both are read as the same message.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from proxy.protocols.dialects.base import engine_message
from proxy.protocols.dialects.held_pieces import TEXT, HeldPieces, Piece
from proxy.protocols.dialects.messages import events as shapes
from proxy.protocols.dialects.messages.errors import error_object
from proxy.protocols.dialects.messages.events import stop_reason_from, usage_from
from proxy.protocols.dialects.partial_json import PartialObject
from proxy.protocols.dialects.tool_arguments import call_ids, choose_call_id, parse_arguments
from proxy.protocols.dialects.translation import CallIdentity, Json
from proxy.protocols.sse import EVENT_STREAM

_REASONING_FIELDS = (
    "reasoning",
    "reasoning_content",
)  # vLLM 0.32 has the first, SGLang 0.5.23 and llama.cpp the second
_NO_RESPONSE = "the engine's response ended before it began"


@dataclass(slots=True)
class _Call:
    """One tool call in a stream. `block` is the index of its block; None until its name arrives."""

    index: int
    block: int | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: PartialObject = field(default_factory=PartialObject)
    waiting: list[str] = field(default_factory=list)


class MessagesRenderer:
    """Renders the response to one call. `stops` are the client's own stop sequences."""

    stream_format = EVENT_STREAM

    def __init__(self, identity: CallIdentity, stops: Any) -> None:
        self._identity = identity
        self._stops = stops
        self._started = False
        self._blocks = 0
        self._open: str | None = None  # the type of the open block
        self._has_text = False
        self._calls: dict[int, _Call] = {}
        self._ids: set[str] = set()
        self._held = HeldPieces()

    def whole(self, response: Json) -> Json:
        """Return an unstreamed response."""
        choice = _first(response)
        content = list(self._content(choice.get("message") or {}))
        reason, stop = stop_reason_from(choice, self._stops)
        return shapes.message(self._identity, content, usage_from(response.get("usage")), reason, stop)

    def feed(self, chunk: Json) -> bytes:
        """Return the events of a chunk."""
        begun = b"" if self._started else self._start(chunk.get("usage"))
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or () if choice.get("index", 0) == 0]
        return begun + b"".join([self._held.take(self._pieces(delta)) for delta in deltas])

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the events that end the stream."""
        if error is not None or response is None:
            message = _NO_RESPONSE if error is None else engine_message(error)
            return shapes.event("error", error=error_object("api_error", message)["error"])
        choice, usage = _first(response), usage_from(response.get("usage"))
        events = [] if self._started else [self._start(response.get("usage"))]
        events.append(self._held.release())
        for call in self._calls.values():
            if call.block is None:
                events += self._begin_call(call)
        if (choice.get("message") or {}).get("content") == "" and not self._has_text:
            events += self._begin("text", shapes.text(""))
        events += self._close()
        reason, stop = stop_reason_from(choice, self._stops)
        delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}
        return b"".join(
            [*events, shapes.event("message_delta", delta=delta, usage=usage), shapes.event("message_stop")]
        )

    def _content(self, message: Mapping[str, Any]) -> Iterator[Json]:
        """Yield the blocks of a message. An empty text is a block after all others; a null text is none."""
        reasoning, content = _reasoning(message), message.get("content")
        if reasoning:
            yield shapes.thinking(reasoning, shapes.signature_for(self._identity))
        if content:
            yield shapes.text(content)
        calls = message.get("tool_calls") or []
        for call_id, call in zip(call_ids(calls, self._identity.step_id), calls, strict=True):
            function = call.get("function") or {}
            yield shapes.tool_use(call_id, function.get("name") or "", parse_arguments(function.get("arguments") or ""))
        if content == "":
            yield shapes.text("")

    def _start(self, usage: Any) -> bytes:
        """Return the first event of the stream and a ping."""
        self._started = True
        message = shapes.message(self._identity, [], {**usage_from(usage), "output_tokens": 0}, None, None)
        return shapes.event("message_start", message=message) + shapes.PING

    def _pieces(self, delta: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield the pieces of a delta: reasoning, text, calls."""
        reasoning, content = _reasoning(delta), delta.get("content")
        if reasoning:
            yield TEXT, partial(self._add_reasoning, reasoning)
        if content:
            yield TEXT, partial(self._add_text, content)
        for piece in delta.get("tool_calls") or ():
            yield piece.get("index", 0), partial(self._add_call, piece)

    def _add_reasoning(self, reasoning: str) -> bytes:
        begun = b"".join(self._begin("thinking", shapes.thinking("", ""), again=False))
        return begun + self._delta(self._blocks - 1, {"type": "thinking_delta", "thinking": reasoning})

    def _add_text(self, content: str) -> bytes:
        self._has_text = True
        begun = b"".join(self._begin("text", shapes.text(""), again=False))
        return begun + self._delta(self._blocks - 1, {"type": "text_delta", "text": content})

    def _add_call(self, piece: Mapping[str, Any]) -> bytes:
        return b"".join(self._call(piece))

    def _call(self, piece: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a piece of a tool call."""
        index, function = piece.get("index", 0), piece.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            call = self._calls[index] = _Call(index)
        call.waiting.append(function.get("arguments") or "")
        if call.block is not None:
            yield from self._feed_arguments(call)
            return
        call.call_id = call.call_id or piece.get("id")
        call.name = function.get("name") or None
        if call.name is not None:
            yield from self._begin_call(call)

    def _begin_call(self, call: _Call) -> Iterator[bytes]:
        call.call_id = choose_call_id(call.call_id, self._ids, self._identity.step_id, call.index)
        yield from self._begin("tool_use", shapes.tool_use(call.call_id, call.name or "", {}))
        call.block = self._blocks - 1
        self._held.open_call = call.index
        yield from self._feed_arguments(call)

    def _feed_arguments(self, call: _Call) -> Iterator[bytes]:
        """Yield the event of the new part of a call's arguments."""
        partial = call.arguments.feed("".join(call.waiting))
        call.waiting.clear()
        if partial and call.block is not None:
            yield self._delta(call.block, {"type": "input_json_delta", "partial_json": partial})

    def _begin(self, kind: str, block: Json, *, again: bool = True) -> Iterator[bytes]:
        """Close the open block and open another; a block of the same type stays open unless `again`."""
        if self._open == kind and not again:
            return
        yield from self._close()
        yield shapes.event("content_block_start", index=self._blocks, content_block=block)
        self._open = kind
        self._blocks += 1

    def _close(self) -> Iterator[bytes]:
        """Close the open block."""
        if self._open == "thinking":
            yield self._delta(
                self._blocks - 1, {"type": "signature_delta", "signature": shapes.signature_for(self._identity)}
            )
        if self._open is not None:
            yield shapes.event("content_block_stop", index=self._blocks - 1)
        self._open = None

    def _delta(self, index: int, delta: Json) -> bytes:
        return shapes.event("content_block_delta", index=index, delta=delta)


def _first(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first choice; a response that was aborted at its beginning may have none."""
    choices = response.get("choices") or [{}]
    first: Mapping[str, Any] = choices[0]
    return first


def _reasoning(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of a message or a delta, if it has any."""
    return next((message[name] for name in _REASONING_FIELDS if message.get(name)), None)
