"""The history of a call: `ResolvedReferences` from recorded turns, and the list of `GET /v1/responses/{id}/input_items`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.protocols.dialects.base import CallIdentity, Json, ResolvedReferences
from proxy.protocols.dialects.chat_format import REASONING_FIELDS
from proxy.protocols.dialects.responses.item_ids import CALL, INPUT, item_name
from proxy.protocols.dialects.responses.renderer import ResponsesRenderer


@dataclass(frozen=True, slots=True)
class Turn:
    """A recorded call of this dialect: the client's body, and the accumulated chat response to it."""

    identity: CallIdentity
    body: Mapping[str, Any]
    response: Json

    def response_object(self) -> Json:
        """Return the response object, as it was first returned."""
        return ResponsesRenderer(self.body, self.identity).whole(self.response)


@dataclass(frozen=True, slots=True)
class Sent:
    """A turn and the chat messages that were sent for it."""

    turn: Turn
    messages: Sequence[Json]


def resolve_references(
    before: Sent | None, named: Iterable[Turn], calls: Mapping[str, Mapping[str, Any]]
) -> ResolvedReferences:
    """Return the references of a call: messages of the turn before it, items of `named` turns, sampled functions by call id.

    The call continues exactly the messages that were sent for the turn before, and the message it sampled. The instructions
    of a turn do not apply to later ones (https://platform.openai.com/docs/api-reference/responses).
    """
    turns = list(named)
    items = {item["id"]: item for turn in turns for item in input_items(turn)}
    for turn in turns:  # an item of a response takes precedence over a client's copy with the same id
        items |= {item["id"]: item for item in turn.response_object()["output"]}
    messages: list[Json] = []
    if before is not None:
        messages = [*_without(before.turn.body.get("instructions"), before.messages), sampled(before.turn)]
    own = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls") or ()}
    return ResolvedReferences(messages, items, {**calls, **own})


def _without(instructions: object, messages: Sequence[Json]) -> Sequence[Json]:
    first = messages[0].get("content") if messages else None
    if not isinstance(instructions, str) or not isinstance(first, str) or not first.startswith(instructions):
        return messages
    rest = first[len(instructions) :].removeprefix("\n\n")
    return [{"role": "system", "content": rest}, *messages[1:]] if rest else messages[1:]


def sampled(turn: Turn) -> Json:
    """Return the message that a turn sampled, with all fields that engines read."""
    message = turn.response["choices"][0].get("message") or {}
    fields: Json = {"role": "assistant", "content": message.get("content")}
    fields |= {name: message[name] for name in REASONING_FIELDS if message.get(name)}
    if message.get("refusal"):
        fields["refusal"] = message["refusal"]
    if message.get("tool_calls"):
        step = turn.identity.step_id
        fields["tool_calls"] = [
            {"id": call.get("id") or item_name(CALL, step, number), "type": "function", "function": call["function"]}
            for number, call in enumerate(message["tool_calls"])
        ]
    return fields


def input_items(turn: Turn) -> list[Json]:
    """Return the input items of a call, each with an id, and the text of messages as a part."""
    value = turn.body.get("input") or ()
    entries = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [
        {"id": item_name(INPUT, turn.identity.step_id, number), "type": "message", **item, **_parts(item)}
        for number, item in enumerate(entries)
    ]


def _parts(item: Json) -> Json:
    content = item.get("content")
    if not isinstance(content, str):
        return {}
    if item.get("role") == "assistant":
        return {"content": [{"type": "output_text", "text": content, "annotations": []}]}
    return {"content": [{"type": "input_text", "text": content}]}
