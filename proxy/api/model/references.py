"""Recorded responses by id: those that a call refers to, with items and tool calls, and the routes below `/v1/responses/{id}`.

Every process that shares the store serves them. The key of a rollout gives no access to other rollouts. Deleting a response
hides it from agents; its step is kept for training.
"""

from dataclasses import replace
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from aiohttp import web
from pydantic import BaseModel, Field

from proxy.api.api_keys import MintedKey
from proxy.api.auth import check_minted
from proxy.api.context import Context
from proxy.api.http import json_response
from proxy.api.model.call import ModelRequest
from proxy.api.requests import query_from
from proxy.errors import NotFound
from proxy.protocols.dialects.base import ResolvedReferences
from proxy.protocols.dialects.responses import RESPONSES, input_items, resolve_references, response_object
from proxy.protocols.dialects.responses.request import rollout_of, step_of
from proxy.protocols.plan import TranslatedCall
from proxy.rollouts.admission import Admitted
from proxy.rollouts.steps import read_step
from proxy.trajectory.step import Step

STORED: Final = "/v1/responses/"
_DELETED_MARK: Final = "deleted:"


class _ListItems(BaseModel):
    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None


def followed_rollout(call: TranslatedCall, minted: MintedKey | None) -> str | None:
    """Return the rollout of the response that a call continues; None if it continues none, or its id has no rollout.

    Raises Forbidden if the API key belongs to another rollout.
    """
    previous = call.references.previous_response
    followed = None if previous is None else rollout_of(previous)
    check_minted(minted, followed)
    return followed


async def with_references(context: Context, admitted: Admitted, call: TranslatedCall) -> TranslatedCall:
    """Return the call with the responses, items and tool calls that it refers to. Raises NotFound for an unknown response."""
    rollout, references = admitted.rollout, call.references
    sampled = await context.continuation.sampled_calls(admitted, references.calls)
    previous = references.previous_response
    if not (sampled or references.items or previous is not None):
        return call
    if call.translation.name != RESPONSES.name:
        return replace(call, resolved=ResolvedReferences(calls=sampled))
    before = None
    # A playback has the steps that it repeats: names of its source's responses are theirs.
    owner = (None if rollout.playback is not None else rollout_of(previous)) or rollout.rollout_id
    if previous is not None:
        before = await find_response_step(context, previous, owner, "previous_response_id")
    steps = dict.fromkeys(step for name in references.items if (step := step_of(name)) is not None)
    read = [await read_step(context.store, owner, step_id) for step_id in steps]
    named = [step for step in read if step is not None and step.dialect == RESPONSES.name]
    return replace(call, resolved=resolve_references(before, named, sampled))


async def find_response_step(context: Context, name: str, owner: str | None, param: str) -> Step:
    """Return the step of a response, which `param` names, in the rollout `owner`. Raises NotFound."""
    step_id = step_of(name)
    step = None if owner is None or step_id is None else await read_step(context.store, owner, step_id)
    is_complete = (
        step is not None and step.dialect == RESPONSES.name and step.status == "complete" and step.response is not None
    )
    if step is None or not is_complete or step.request.get("store") is False:
        raise NotFound(f"Response {name[:200]!r} not found.", param=param)
    return step


async def answer_stored(call: ModelRequest) -> web.Response:
    """`GET` and `DELETE /v1/responses/{id}`, `GET /v1/responses/{id}/input_items`. Raises NotFound."""
    request, context, minted = call.request, call.context, call.caller.minted
    name, _, rest = unquote(call.endpoint.removeprefix(STORED)).partition("/")
    named = call.rollout_id or (minted.rollout_id if minted else None)
    check_minted(minted, rollout_of(name))
    if (request.method, rest) not in {("GET", ""), ("DELETE", ""), ("GET", "input_items")}:
        raise NotFound(
            f"{request.method} {call.endpoint} is not supported; responses can be retrieved, listed and deleted."
        )
    step = await find_response_step(context, name, rollout_of(name) or named, "response_id")
    mark = _DELETED_MARK + step.step_id
    if await context.store.marks(step.rollout_id, [mark]):
        raise NotFound(f"Response {name[:200]!r} was deleted.", param="response_id")
    if request.method == "DELETE":
        stored = await context.store.get(step.rollout_id)
        if stored is not None:
            await context.store.mark(step.rollout_id, stored.incarnation, {mark: b"1"}, now_ms=context.clock.now_ms())
        return json_response({"id": name, "object": "response", "deleted": True})
    return json_response(response_object(step) if rest == "" else _listed(request, step))


def _listed(request: web.Request, step: Step) -> dict[str, Any]:
    """Return a page of the input items of a call, by default the latest first."""
    items = input_items(step)
    asked = query_from(request, _ListItems, takes_others=True)
    if asked.order == "desc":
        items.reverse()
    after, ids = asked.after, [item["id"] for item in items]
    if after is not None and after not in ids:
        raise NotFound(f"Item {after[:200]!r} not found.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + asked.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = start + asked.limit < len(items)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
