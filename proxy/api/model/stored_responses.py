"""The routes below `/v1/responses/{id}`, served from recorded steps by every process that shares the store.

Deleting a response hides it from agents; its step is kept for training.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from aiohttp import web
from pydantic import BaseModel, Field

from proxy.api.auth import check_minted
from proxy.api.http import json_response
from proxy.api.model.call import ModelRequest
from proxy.api.model.references import find_response_step, turn_of
from proxy.api.query import query_from
from proxy.errors import NotFound
from proxy.protocols.dialects.responses.history import input_items
from proxy.protocols.dialects.responses.item_ids import rollout_of
from proxy.trajectory.step import Step

STORED: Final = "/v1/responses/"
_DELETED_MARK: Final = "deleted:"


class _ListItems(BaseModel):
    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None


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
    step = await find_response_step(context, name, named)
    mark = _DELETED_MARK + step.step_id
    if await context.store.marks(step.rollout_id, [mark]):
        raise NotFound(f"Response {name[:200]!r} was deleted.", param="response_id")
    if request.method == "DELETE":
        stored = await context.store.get(step.rollout_id)
        if stored is not None:
            await context.store.mark(step.rollout_id, stored.incarnation, {mark: b"1"}, now_ms=context.clock.now_ms())
        return json_response({"id": name, "object": "response", "deleted": True})
    return json_response(turn_of(step).response_object() if rest == "" else _listed(request, step))


def _listed(request: web.Request, step: Step) -> dict[str, Any]:
    """Return a page of the input items of a call, by default the latest first."""
    items = input_items(turn_of(step))
    asked = query_from(request, _ListItems, takes_others=True)
    if asked.order == "desc":
        items.reverse()
    start = _index_after(asked.after, [item["id"] for item in items])
    page = items[start : start + asked.limit]
    ids = [item["id"] for item in page] or [None]
    more = start + asked.limit < len(items)
    return {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def _index_after(name: str | None, ids: Sequence[str]) -> int:
    if name is None:
        return 0
    if name not in ids:
        raise NotFound(f"Item {name[:200]!r} not found.", param="after")
    return ids.index(name) + 1
