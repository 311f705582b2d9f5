"""Anthropic's Messages API, translated to chat: its requests are read in `request`, its responses and errors are rendered here.

A stream opens a block with its first piece and closes it when another begins; the block of a call is closed by `finish`, which
also sends what follows it. Accumulated, the events are the whole response.

A message with text after its calls, or reasoning after its text, keeps that order in a stream; rendered whole, it has chat's
order: reasoning, text, calls. Sent back, both are read as the same message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import (
    EVENT_STREAM,
    CallIdentity,
    DialectName,
    Json,
    References,
    ResponseRenderer,
    Translator,
    engine_message,
)
from proxy.protocols.dialects.messages.request import read, tool_call_ids
from proxy.protocols.dialects.translation import (
    TEXT,
    HeldPieces,
    PartialObject,
    call_ids,
    choices_of,
    choose_call_id,
    event,
    parse_arguments,
    read_usage,
    reasoning_of,
    text_part,
)

_NO_RESPONSE = "the engine's response ended before it began"
_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(slots=True)
class _Call:
    """One tool call in a stream. `block` is the index of its block; None until its name arrives."""

    index: int
    block: int | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: PartialObject = field(default_factory=PartialObject)
    waiting: list[str] = field(default_factory=list)


class MessagesRenderer(ResponseRenderer):
    """Renders the response to one call. `stops` are the client's own stop sequences."""

    stream_format = EVENT_STREAM

    def __init__(self, identity: CallIdentity, stops: Any) -> None:
        self._identity = identity
        self._signature = f"sig_{identity.step_id}"  # clients do not send back reasoning without one
        self._stops = stops
        self._started = False
        self._blocks = 0
        self._open: str | None = None  # the type of the open block
        self._has_text = False
        self._calls: dict[int, _Call] = {}
        self._ids: set[str] = set()
        self._held = HeldPieces()

    def whole(self, response: Json) -> Json:
        choice = choices_of(response)[0]
        content = list(self._content(choice.get("message") or {}))
        reason, stop = stop_reason_from(choice, self._stops)
        return self._message(content, usage_from(response.get("usage")), reason, stop)

    def feed(self, chunk: Json) -> bytes:
        events = [] if self._started else [self._start(chunk.get("usage"))]
        take = self._held.take
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            if reasoning := reasoning_of(delta):
                events.append(take(TEXT, self._add_text, reasoning, "thinking"))
            if content := delta.get("content"):
                events.append(take(TEXT, self._add_text, content, "text"))
            if calls := delta.get("tool_calls"):
                events += [take(call.get("index", 0), self._add_call, call) for call in calls]
        return b"".join(events)

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        if error is not None or response is None:
            message = _NO_RESPONSE if error is None else engine_message(error)
            return event("error", error=error_object("api_error", message)["error"])
        choice, usage = choices_of(response)[0], usage_from(response.get("usage"))
        events = [] if self._started else [self._start(response.get("usage"))]
        events.append(self._held.release())
        for call in self._calls.values():
            if call.block is None:
                events += self._begin_call(call)
        if (choice.get("message") or {}).get("content") == "" and not self._has_text:
            events += self._begin("text", text_part(""))
        events += self._close()
        reason, stop = stop_reason_from(choice, self._stops)
        delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}
        return b"".join([*events, event("message_delta", delta=delta, usage=usage), event("message_stop")])

    def _message(self, content: list[Json], usage: Json, reason: str | None, stop: str | None) -> Json:
        """Return the response, at its beginning or complete."""
        return {
            "id": f"msg_{self._identity.step_id}",
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "usage": usage,
        }

    def _content(self, message: Mapping[str, Any]) -> Iterator[Json]:
        """Yield the blocks of a message. An empty text is a block after all others; a null text is none."""
        if reasoning := reasoning_of(message):
            yield _thinking(reasoning, self._signature)
        if content := message.get("content"):
            yield text_part(content)
        calls = message.get("tool_calls") or []
        for call_id, call in zip(call_ids(calls, self._identity.step_id), calls, strict=True):
            function = call.get("function") or {}
            yield _tool_use(call_id, function.get("name") or "", parse_arguments(function.get("arguments") or ""))
        if content == "":
            yield text_part("")

    def _start(self, usage: Any) -> bytes:
        self._started = True
        begun = self._message([], {**usage_from(usage), "output_tokens": 0}, None, None)
        return event("message_start", message=begun) + _PING

    def _add_text(self, content: str, kind: str) -> bytes:
        begun = b""
        if self._open != kind:
            begun = b"".join(self._begin(kind, text_part("") if kind == "text" else _thinking("", "")))
        self._has_text = self._has_text or kind == "text"
        delta = {"type": f"{kind}_delta", kind: content}
        return begun + event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _add_call(self, piece: Mapping[str, Any]) -> bytes:
        index, function = piece.get("index", 0), piece.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            call = self._calls[index] = _Call(index)
        call.waiting.append(function.get("arguments") or "")
        if call.block is not None:
            return b"".join(self._feed_arguments(call))
        call.call_id = call.call_id or piece.get("id")
        call.name = function.get("name") or None
        return b"" if call.name is None else b"".join(self._begin_call(call))

    def _begin_call(self, call: _Call) -> Iterator[bytes]:
        call.call_id = choose_call_id(call.call_id, self._ids, self._identity.step_id, call.index)
        yield from self._begin("tool_use", _tool_use(call.call_id, call.name or "", {}))
        call.block = self._blocks - 1
        self._held.open_call = call.index
        yield from self._feed_arguments(call)

    def _feed_arguments(self, call: _Call) -> Iterator[bytes]:
        partial = call.arguments.feed("".join(call.waiting))
        call.waiting.clear()
        if partial and call.block is not None:
            delta = {"type": "input_json_delta", "partial_json": partial}
            yield event("content_block_delta", index=call.block, delta=delta)

    def _begin(self, kind: str, block: Json) -> Iterator[bytes]:
        yield from self._close()
        yield event("content_block_start", index=self._blocks, content_block=block)
        self._open = kind
        self._blocks += 1

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            yield event("content_block_delta", index=self._blocks - 1, delta=delta)
        if self._open is not None:
            yield event("content_block_stop", index=self._blocks - 1)
        self._open = None


def _thinking(reasoning: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": reasoning, "signature": signature}


def _tool_use(call_id: str, name: str, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def error_object(kind: str, message: str, **details: Any) -> Json:
    """Return an error, as in bodies and events."""
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


# By chat's finish reason. `abort`: the engine interrupted the call (its weights change), and the agent may continue from the
# partial response, as with Anthropic's `pause_turn`. `repetition` (vLLM) is a limit like any other.
_REASONS: Final = {
    "length": "max_tokens", "repetition": "max_tokens", "content_filter": "refusal", "abort": "pause_turn", None: "pause_turn",
}  # fmt: skip


def stop_reason_from(choice: Mapping[str, Any], stops: Any) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a choice; the latter is None unless it is one of the client's (`stops`).

    vLLM has the string in `stop_reason`, SGLang in `matched_stop`; llama.cpp's server has none, so it is `end_turn`.
    """
    finish = choice.get("finish_reason")
    if finish in _REASONS:
        return _REASONS[finish], None
    if (choice.get("message") or {}).get("tool_calls"):
        return "tool_use", None
    for matched in (choice.get("stop_reason"), choice.get("matched_stop")):
        if isinstance(matched, str) and isinstance(stops, list) and matched in stops:
            return "stop_sequence", matched
    return "end_turn", None


def usage_from(usage: Any) -> Json:
    """Return the usage in this dialect: `input_tokens` excludes tokens from the engine's prefix cache."""
    counts = read_usage(usage)
    details = {} if counts.reasoning is None else {"output_tokens_details": {"thinking_tokens": counts.reasoning}}
    return {
        "input_tokens": max(0, counts.prompt - counts.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        **details,
    }


# By status, each of Anthropic's API.
_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
# By the refused parameter. The SDK's tool runner requests a thread first, and continues without one if the error has these
# details (anthropic 2.12, lib/threads).
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


class Messages(Translator):
    """`POST /v1/messages`."""

    name: DialectName = "messages"
    has_system_turns = True
    read = staticmethod(read)

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the ids of tool calls: the client's copies lack the sampled text of their arguments."""
        return References(calls=sorted(tool_call_ids(body)))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> MessagesRenderer:
        return MessagesRenderer(identity, body.get("stop_sequences"))

    def error(self, error: ProxyError) -> bytes:
        """Return Anthropic's error body, which has no field for a parameter: the message names it."""
        details = {"details": _DETAILS[error.param]} if error.param in _DETAILS else {}
        return orjson.dumps(error_object(type_for(error.status), error.message, **details))

    def engine_error(self, status: int, text: str) -> bytes:
        return orjson.dumps(error_object(type_for(status), engine_message(text)))

    def is_spoken(self, endpoint: str, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or endpoint.startswith("/v1/messages/")

    def models(self, entries: Sequence[Json]) -> Json:
        data = [self.model(entry) for entry in entries]
        ids = [entry["id"] for entry in data] or [None]
        return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    def model(self, entry: Json) -> Json:
        """Return one model. Unknown values are null; an unknown creation time is the epoch."""
        name, created, longest = str(entry.get("id")), entry.get("created"), entry.get("max_model_len")
        moment = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 1 << 37 else 0, UTC)
        longest = longest if type(longest) is int else None
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": longest,
            "max_tokens": longest,
        }


def type_for(status: int) -> str:
    """Return the error type of a status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


MESSAGES: Final = Messages()
