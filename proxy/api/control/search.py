"""The route of `/search`: rollouts whose prompts, replies or errors have a text."""

from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import RolloutFilter, Search
from proxy.api.http import json_response
from proxy.api.query import query_from
from proxy.errors import BadRequest, Damaged, NotFound
from proxy.rollouts.rollout import Rollout, read_rollout
from proxy.rollouts.steps import aside, read_steps, weights_of
from proxy.rollouts.stored_fields import left_out
from proxy.trajectory.text_search import Match, Needle, search

_MATCHES: Final = 5  # of a rollout
_PAGE: Final = 16  # rollouts that are searched before the time is checked
_BUDGET_S: Final = 1.0


async def search_rollouts(request: web.Request) -> web.Response:
    """`GET /search?q=&status=&group_id=&limit=&cursor=`: newest first.

    A response ends after a second of work or `limit` rollouts with matches; `cursor` continues it.
    """
    context = request.app[CONTEXT]
    asked = query_from(request, Search)
    run, cursor = _Run(context, Needle(asked.q), asked), asked.cursor
    began = context.clock.monotonic()
    while True:
        try:
            page = await context.store.list(cursor=cursor, limit=_PAGE)
        except ValueError as error:
            raise BadRequest(str(error), param="cursor") from None
        for name in page.names:
            await run.take(name)
        cursor = page.cursor
        if cursor is None or len(run.found) >= asked.limit or context.clock.monotonic() - began >= _BUDGET_S:
            break
    searched = {"rollouts": run.rollouts, "steps": run.steps, "oldest_ms": run.oldest_ms}
    searched["unreadable"] = len(run.unreadable)
    named = {"unreadable": run.unreadable} if run.unreadable else {}
    return json_response({"query": asked.q, "rollouts": run.found, "searched": searched, "cursor": cursor, **named})


class _Run:
    """What one request has searched and found."""

    def __init__(self, context: Context, needle: Needle, asked: RolloutFilter) -> None:
        self.found: list[dict[str, Any]] = []
        self.rollouts = self.steps = 0
        self.unreadable: list[dict[str, str]] = []
        self.oldest_ms: int | None = None
        self._context = context
        self._needle = needle
        self._asked = asked

    async def take(self, name: str) -> None:
        """Search a rollout, if it still exists and the filter matches it."""
        stored = await self._context.store.get(name)
        if stored is None:
            return
        try:
            rollout = read_rollout(stored)
            if not self._asked.matches(rollout):
                return
            steps = await read_steps(self._context.store, rollout, whole=True)
        except NotFound:
            return  # deleted meanwhile
        except Damaged as damage:
            self.unreadable += left_out([damage], self._context.metrics)
            return
        matches = await aside(weights_of(steps).packed, lambda: search(steps, self._needle, _MATCHES))
        self.rollouts += 1
        self.steps += len(steps)
        self.oldest_ms = rollout.created_ms
        if matches:
            self.found.append(_entry(rollout, matches))


def _entry(rollout: Rollout, matches: list[Match]) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "status": rollout.status,
        "reward": rollout.reward,
        "created_ms": rollout.created_ms,
        "matches": [asdict(match) for match in matches],
    }
