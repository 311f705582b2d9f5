"""What all translators write to chat bodies and read from chat responses, and the stream pieces that they delay."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from proxy.protocols.dialects.base import Json
from proxy.protocols.sampling import SAMPLING_FIELDS
from proxy.trajectory.conversations import THOUGHTS

CONTINUES: Final = {"continue_final_message": True, "add_generation_prompt": False}


def passed_fields(body: Mapping[str, Any], translated: Collection[str]) -> Json:
    """Return the engine's sampling fields in a body, except the `translated` fields. The engine validates them."""
    return {name: body[name] for name in SAMPLING_FIELDS if name not in translated and body.get(name) is not None}


def add_configured(chat: Json, fields: Mapping[str, Any]) -> None:
    """Add configured fields to a chat body. The body's own fields override them."""
    for name, value in fields.items():
        own = chat.get(name)
        if isinstance(own, dict) and isinstance(value, Mapping):
            chat[name] = {**value, **own}
        elif own is None:
            chat[name] = value


def continue_last(chat: Json, reasoning_field: str) -> None:
    """Let the model continue the last message if it is not empty; remove an empty one."""
    last = chat["messages"][-1]
    if last["content"] or last.get(reasoning_field):
        chat |= CONTINUES
    else:
        chat["messages"] = chat["messages"][:-1]


def chat_content(parts: list[Json]) -> str | list[Json]:
    """Return chat content with these parts: a single text is a string, as chat's clients send it."""
    text: str | list[Json] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return text


def chat_call(call_id: str, name: str, arguments: str) -> Json:
    """Return a tool call of a chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def schema_format(schema: Json) -> Json:
    """Return the chat field of a response format with a schema; `schema` are its name, its JSON Schema and its options."""
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def choices_of(response: Mapping[str, Any]) -> list[Json]:
    """Return the choices, at least one: a response that was aborted at its beginning may have none."""
    return response.get("choices") or [{}]


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Return the reasoning of a message or a delta; None if it has none."""
    for name in THOUGHTS:  # without a generator: for each event of a stream
        if message.get(name):
            return message[name]
    return None


class Usage(NamedTuple):
    """The token counts of a chat response. `reasoning` is None if the engine does not count it."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None


def read_usage(usage: Any) -> Usage:
    """Return the counts of a chat response; an invalid or absent count is 0."""
    reasoning = _count(usage, "completion_tokens_details", "reasoning_tokens")
    return Usage(
        _count(usage, "prompt_tokens") or 0,
        _count(usage, "completion_tokens") or 0,
        _count(usage, "prompt_tokens_details", "cached_tokens") or 0,
        _count(usage, "reasoning_tokens") if reasoning is None else reasoning,  # SGLang 0.5.23
    )


def _count(value: Any, *path: str) -> int | None:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if type(value) is int else None


def event(kind: str, **fields: Any) -> bytes:
    """Return one event of a stream."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


TEXT: Final = -1  # in place of the index of a call: reasoning or text

Piece: TypeAlias = tuple[int, Callable[[], bytes]]  # the index of its call or TEXT, and what writes its events


class HeldPieces:
    """Writes pieces as they arrive until a call is open; then only pieces of this call, and all others at the end.

    A call is complete for a client when the next block or item begins: Claude Code 2.1 and Codex 0.169 then run its tool, while
    the rest is sampled. If the engine failed after that, a tool would have run for a response without a complete step.
    """

    __slots__ = ("_held", "open_call")

    def __init__(self) -> None:
        self.open_call: int | None = None  # its index
        self._held: dict[int, list[Callable[[], bytes]]] = {}

    @property
    def calls(self) -> list[int]:
        """The indices of the held calls, in the order in which they began."""
        return [index for index in self._held if index != TEXT]

    def take(self, pieces: Iterable[Piece]) -> bytes:
        """Return the events of the pieces that are not held. What writes a call sets `open_call`."""
        events = []
        for index, write in pieces:
            if self.open_call is None or self.open_call == index:
                events.append(write())
            else:
                self._held.setdefault(index, []).append(write)
        return b"".join(events)

    def release(self) -> bytes:
        """Return the events of the held pieces, grouped by call."""
        held, self._held = self._held, {}
        return b"".join([write() for writers in held.values() for write in writers])
