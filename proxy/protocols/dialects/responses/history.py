"""The history of a call: `ResolvedReferences` from recorded turns, and the list of `GET /v1/responses/{id}/input_items`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.protocols.dialects.responses.input_items import calls_of, references_of
from proxy.protocols.dialects.responses.item_ids import CALL, INPUT, item_name
from proxy.protocols.dialects.responses.renderer import THOUGHTS, ResponsesRenderer
from proxy.protocols.dialects.translation import CallIdentity, Json, ResolvedReferences


@dataclass(frozen=True, slots=True)
class Turn:
    """A recorded call of this dialect: the client's body, and the accumulated chat response to it."""

    told: CallIdentity
    body: Mapping[str, Any]
    response: Json

    def answer(self) -> Json:
        """The response object, as it was told when it came."""
        return ResponsesRenderer(self.body, self.told).whole(self.response)


@dataclass(frozen=True, slots=True)
class Sent:
    """A turn, and the chat messages that were sent for it."""

    turn: Turn
    messages: Sequence[Json]


def resolve_references(before: Sent | None, named: Iterable[Turn], calls: Mapping[str, str]) -> ResolvedReferences:
    """What a call leans on: the turn before it, items of `named` turns, and argument texts by call id.

    What the turn before was sent, and what it sampled, is what this one goes on from, to the letter. Its instructions do not
    hold for later ones (https://platform.openai.com/docs/api-reference/responses).
    """
    turns = list(named)
    items = {item["id"]: item for turn in turns for item in input_items(turn)}
    for turn in turns:  # what was told goes before what came back under its name
        items |= {item["id"]: item for item in turn.answer()["output"]}
    messages: list[Json] = []
    if before is not None:
        messages = [*_without(before.turn.body.get("instructions"), before.messages), sampled(before.turn)]
    own = {call["id"]: call["function"]["arguments"] for call in _calls(messages)}
    return ResolvedReferences(messages, items, {**calls, **own})


def _without(instructions: object, messages: Sequence[Json]) -> Sequence[Json]:
    """Messages as they were sent, without the instructions that they began with."""
    first = messages[0].get("content") if messages else None
    if not isinstance(instructions, str) or not isinstance(first, str) or not first.startswith(instructions):
        return messages
    rest = first[len(instructions) :].removeprefix("\n\n")
    return [{"role": "system", "content": rest}, *messages[1:]] if rest else messages[1:]


def sampled(turn: Turn) -> Json:
    """The message that a turn sampled, as a client of chat sends it back with all that engines read of it."""
    message = turn.response["choices"][0].get("message") or {}
    said: Json = {"role": "assistant", "content": message.get("content")}
    said |= {name: message[name] for name in THOUGHTS if message.get(name)}
    if message.get("refusal"):
        said["refusal"] = message["refusal"]
    if message.get("tool_calls"):
        step = turn.told.step_id
        said["tool_calls"] = [
            {"id": call.get("id") or item_name(CALL, step, number), "type": "function", "function": call["function"]}
            for number, call in enumerate(message["tool_calls"])
        ]
    return said


def input_items(turn: Turn) -> list[Json]:
    """The items of a call, each with an id, and a message's text as a part."""
    given = turn.body.get("input") or ()
    entries = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [
        {"id": item_name(INPUT, turn.told.step_id, number), "type": "message", **item, **_parts(item)}
        for number, item in enumerate(entries)
    ]


def _parts(item: Json) -> Json:
    """The content of a message that is a string, as parts."""
    content = item.get("content")
    if not isinstance(content, str):
        return {}
    if item.get("role") == "assistant":
        return {"content": [{"type": "output_text", "text": content, "annotations": []}]}
    return {"content": [{"type": "input_text", "text": content}]}


def call_references(body: Mapping[str, Any]) -> list[str]:
    """Ids of calls whose sampled argument text is wanted of the rollout's earlier steps."""
    return calls_of(body.get("input"))


def item_references(body: Mapping[str, Any]) -> list[str]:
    """Ids of items that are wanted of earlier answers: each names its step (`names.step_of`)."""
    return references_of(body.get("input"))


def unrestorable_calls(told: CallIdentity, body: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Json]:
    """The calls of an answer as they were sampled, by the id they are told by: clients spell arguments anew."""
    return {call["id"]: dict(call["function"]) for call in _calls([sampled(Turn(told, body, dict(response)))])}


def _calls(messages: Iterable[Json]) -> list[Json]:
    return [call for message in messages for call in message.get("tool_calls") or ()]
