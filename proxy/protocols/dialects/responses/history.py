"""The history of a call: `ResolvedReferences` from recorded calls, and the list of `GET /v1/responses/{id}/input_items`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxy.protocols.dialects.base import CallIdentity, Json, ResolvedReferences
from proxy.protocols.dialects.responses.item_ids import CALL, INPUT, item_name
from proxy.protocols.dialects.responses.renderer import ResponsesRenderer
from proxy.trajectory.conversations import THOUGHTS
from proxy.trajectory.step import Step, messages_of


def response_object(step: Step) -> Json:
    """Return the response object of a complete call, as it was first returned."""
    return ResponsesRenderer(step.request, CallIdentity.of(step)).whole(dict(step.response or {}))


def resolve_references(
    before: Step | None, named: Iterable[Step], calls: Mapping[str, Mapping[str, Any]]
) -> ResolvedReferences:
    """Return the references of a call: messages of the call before it, items of `named` calls, sampled functions by call id.

    The call continues exactly the messages that were sent for the call before, and the message it sampled. The instructions
    of a call do not apply to later ones (https://platform.openai.com/docs/api-reference/responses).
    """
    steps = list(named)
    items = {item["id"]: item for step in steps for item in input_items(step)}
    for step in steps:  # an item of a response takes precedence over a client's copy with the same id
        items |= {item["id"]: item for item in response_object(step)["output"]}
    messages: list[Json] = []
    if before is not None:
        messages = [*_without(before.request.get("instructions"), messages_of(before)), sampled(before)]
    own = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls") or ()}
    return ResolvedReferences(messages, items, {**calls, **own})


def _without(instructions: object, messages: Sequence[Json]) -> Sequence[Json]:
    first = messages[0].get("content") if messages else None
    if not isinstance(instructions, str) or not isinstance(first, str) or not first.startswith(instructions):
        return messages
    rest = first[len(instructions) :].removeprefix("\n\n")
    return [{"role": "system", "content": rest}, *messages[1:]] if rest else messages[1:]


def sampled(step: Step) -> Json:
    """Return the message that a call sampled, with all fields that engines read."""
    message = (step.response or {})["choices"][0].get("message") or {}
    fields: Json = {"role": "assistant", "content": message.get("content")}
    fields |= {name: message[name] for name in (*THOUGHTS, "refusal") if message.get(name)}
    if message.get("tool_calls"):
        fields["tool_calls"] = [
            {
                "id": call.get("id") or item_name(CALL, step.step_id, number),
                "type": "function",
                "function": call["function"],
            }
            for number, call in enumerate(message["tool_calls"])
        ]
    return fields


def input_items(step: Step) -> list[Json]:
    """Return the input items of a call, each with an id, and the text of messages as a part."""
    value = step.request.get("input") or ()
    entries = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [
        {"id": item_name(INPUT, step.step_id, number), "type": "message", **item, **_parts(item)}
        for number, item in enumerate(entries)
    ]


def _parts(item: Json) -> Json:
    content = item.get("content")
    if not isinstance(content, str):
        return {}
    if item.get("role") == "assistant":
        return {"content": [{"type": "output_text", "text": content, "annotations": []}]}
    return {"content": [{"type": "input_text", "text": content}]}
