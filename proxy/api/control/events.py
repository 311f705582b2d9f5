"""The route of `/events`: changes of rollouts as server-sent events, each with the IDs of the rollout and the step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import ShowEvents
from proxy.api.query import query_from
from storage.errors import StorageError
from storage.types import Change

_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def show_events(request: web.Request) -> web.StreamResponse:
    """`GET /events?rollout_id=`: stream server-sent events of every process that shares the store, from now on.

    An event `changed` for each stored step (`index`, `step_id`) and each other change of a rollout (both null); a comment
    every few seconds. The stream ends when the store is unreachable or the proxy stops. Events are not repeated: clients
    read the rollouts again when they reconnect.
    """
    context = request.app[CONTEXT]
    rollout_id = query_from(request, ShowEvents).rollout_id
    async with context.store.changes.subscribe() as changes:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        await response.write(b": following\n\n")
        sending = asyncio.create_task(_send(response, changes, rollout_id))  # noqa: TID251 - held by this very function
        stopping = asyncio.create_task(context.stopping.wait())  # noqa: TID251
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            stopping.cancel()
            with suppress(StorageError, OSError, asyncio.CancelledError):
                await sending
    return response


async def _send(response: web.StreamResponse, changes: AsyncIterator[Change | None], rollout_id: str | None) -> None:
    async for change in changes:
        if change is None:
            await response.write(b": quiet\n\n")
        elif rollout_id in (None, change.rollout):
            await response.write(to_event(change))


def to_event(change: Change) -> bytes:
    """Return a change as an event. Invalid characters of names are replaced."""
    name = change.rollout.encode("utf-8", "replace").decode()
    fields = {"rollout_id": name, "index": change.index, "step_id": change.record}
    return b"event: changed\ndata: " + orjson.dumps(fields) + b"\n\n"
