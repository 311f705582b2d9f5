"""The results of function calls, each assigned to its call.

Invariant: a result is never assigned to another call than its own. Clients may omit ids: a result without one belongs to the
next call of its function that has none, as in Google's API.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.protocols.dialects.gemini.fields import objects, optional, required
from proxy.protocols.dialects.gemini.media import file_part, inline_part
from proxy.protocols.dialects.tool_arguments import serialize
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_flag, a_text, an_object, refusal


@dataclass(frozen=True, slots=True)
class FunctionResponse:
    """A result. `call_id` is None if the client omits it; `media` are its chat parts."""

    path: str
    name: str
    call_id: str | None
    text: str
    media: Sequence[Json]


def read_response(value: Json, path: str) -> FunctionResponse:
    """Return a function response. Raises UnprocessableRequest."""
    if optional(a_flag, value, "willContinue", path):
        raise refusal(f"{path}.willContinue", "results in several parts are not supported")
    response = optional(an_object, value, "response", path)
    media = [_media(part, part_path) for part, part_path in optional(objects, value, "parts", path) or ()]
    return FunctionResponse(
        path=path,
        name=required(a_text, value, "name", path),
        call_id=optional(a_text, value, "id", path) or None,
        text="" if response is None else _text(response, f"{path}.response"),
        media=media,
    )


def tool_messages(calls: Sequence[Json], responses: Sequence[FunctionResponse], path: str) -> list[Json]:
    """Return the tool messages of the calls, in the order of the calls, which templates without ids require.

    Their media are in a user message after them. Raises UnprocessableRequest unless each call has exactly one result.
    """
    if len(calls) != len(responses):
        raise refusal(
            path,
            f"the model's turn before has {len(calls)} function calls, and this turn {len(responses)} function responses",
        )
    results = _assigned(calls, responses)
    messages: list[Json] = [
        {"role": "tool", "tool_call_id": call["id"], "content": results[call["id"]].text} for call in calls
    ]
    media = [part for call in calls for part in results[call["id"]].media]
    return [*messages, {"role": "user", "content": media}] if media else messages


def _assigned(calls: Sequence[Json], responses: Sequence[FunctionResponse]) -> dict[str, FunctionResponse]:
    """Return the results by the ids of their calls. Results with the id of a call are assigned first."""
    left = {call["id"]: call["function"]["name"] for call in calls}
    results: dict[str, FunctionResponse] = {}
    unassigned: list[FunctionResponse] = []
    for response in responses:
        if response.call_id in results:
            raise refusal(f"{response.path}.id", f"{response.call_id[:64]!r} is the id of another function response")
        if response.call_id is None or response.call_id not in left:
            unassigned.append(response)
        elif left.pop(response.call_id) != response.name:
            raise refusal(f"{response.path}.name", f"is not the name of call {response.call_id[:64]!r}")
        else:
            results[response.call_id] = response
    waiting: dict[str, deque[str]] = {}
    for call_id, name in left.items():
        waiting.setdefault(name, deque()).append(call_id)
    for response in unassigned:
        results[_next(waiting.get(response.name), response)] = response
    return results


def _next(waiting: deque[str] | None, response: FunctionResponse) -> str:
    """Return the id of the call that a result without the id of a call belongs to; `waiting` are those of its function."""
    if not waiting:
        raise refusal(response.path, f"no call of {response.name[:64]!r} in the turn before is without a result")
    if response.call_id is not None and len(waiting) > 1:  # an id that belongs to none of them
        raise refusal(f"{response.path}.id", f"{response.call_id[:64]!r} is not the id of a call in the turn before")
    return waiting.popleft()


def _text(response: Json, path: str) -> str:
    """Return the text for the model: the value of `output` if it is the only field, as Google documents, else all as JSON."""
    value: Any = response["output"] if response.keys() == {"output"} else response
    if isinstance(value, str):
        return value
    return serialize(value, path)  # as arguments, which are written as Python's JSON


def _media(part: Json, path: str) -> Json:
    inline = optional(an_object, part, "inlineData", path)
    if inline is not None:
        return inline_part(inline, f"{path}.inlineData")
    return file_part(required(an_object, part, "fileData", path), f"{path}.fileData")
