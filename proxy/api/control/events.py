"""What happens to rollouts, as it happens.

Holds the route of `/events`. It tells which rollout changed and which step came; whoever wants more asks the other routes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.query import reject_unknown_params
from storage.errors import StorageError
from storage.types import Change

_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def show_events(request: web.Request) -> web.StreamResponse:
    """`GET /events?rollout_id=`: server-sent events, from now on, of every process that shares the store.

    `changed` for each step that is stored (`index`, `step_id`) and each other change of a rollout (both null); a comment
    every few seconds. When the store is away, or the proxy stops, the stream ends: whoever comes back looks anew.
    """
    context = request.app[CONTEXT]
    reject_unknown_params(request, ("rollout_id",))
    wanted = request.query.get("rollout_id")
    async with context.store.changes.subscribe() as changes:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        await response.write(b": following\n\n")
        telling = asyncio.create_task(_tell(response, changes, wanted))  # noqa: TID251 - held by this very function
        stopping = asyncio.create_task(context.stopping.wait())  # noqa: TID251
        try:
            await asyncio.wait((telling, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            telling.cancel()
            stopping.cancel()
            with suppress(StorageError, OSError, asyncio.CancelledError):
                await telling
    return response


async def _tell(response: web.StreamResponse, changes: AsyncIterator[Change | None], wanted: str | None) -> None:
    async for change in changes:
        if change is None:
            await response.write(b": quiet\n\n")
        elif wanted in (None, change.rollout):
            await response.write(event_of(change))


def event_of(change: Change) -> bytes:
    """A change as an event. Names that are no valid text are told as they can be."""
    name = change.rollout.encode("utf-8", "replace").decode()
    told = {"rollout_id": name, "index": change.index, "step_id": change.record}
    return b"event: changed\ndata: " + orjson.dumps(told) + b"\n\n"
