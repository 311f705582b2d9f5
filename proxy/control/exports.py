"""Exports: rows for trainers, of one rollout or of many.

Holds the reading of options, and the streaming of rows: one rollout at a time, so that memory does not grow with how many
there are.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.control.access import choice_of, number_of, only_known, rollout_of
from proxy.control.rollouts import filter_of
from proxy.control.steps import facts_of, read_steps
from proxy.errors import BadCall
from proxy.export import FORMATS, Format, Rows
from proxy.export.containers import Container, container_for
from proxy.parts import PARTS, Parts
from proxy.rollouts import Rollout, read_rollout
from proxy.trajectory.sequence import Options

_OPTIONS = ("format", "branches", "include", "max_len", "overlong", "container", "report")
_RENDER_IN_THREAD_FROM_STEPS = 32  # about a millisecond of joining and writing


async def export_rollout(request: web.Request) -> web.StreamResponse:
    """`GET /rollouts/{id}/export?format=…`: the rows; `X-Export-Skipped` tells how many steps gave none, and why."""
    only_known(request, _OPTIONS)
    wanted = Wanted(request)
    rollout = await rollout_of(request)
    rows = await wanted.rows(request.app[PARTS], rollout)
    body = await asyncio.to_thread(wanted.render, rows) if len(rows.rows) > 1 else wanted.render(rows)
    headers = {"X-Export-Skipped": _told(rows.skipped)} if rows.skipped or not rows.rows else {}
    return web.Response(body=body, content_type=wanted.container.content_type, headers=headers)


async def export_many(request: web.Request) -> web.StreamResponse:
    """`GET /export?format=…&status=&group_id=&since=&limit=`: rollouts newest first, streamed as they are read."""
    only_known(request, (*_OPTIONS, "status", "group_id", "since", "limit"))
    parts = request.app[PARTS]
    wanted = Wanted(request)
    rollouts = _rollouts(request, parts)
    response = web.StreamResponse(headers={"Content-Type": wanted.container.content_type})
    await response.prepare(request)
    skipped: list[dict[str, str]] = []
    first = True
    try:
        await response.write(wanted.container.opening(wanted.form.name))
        async for rollout in rollouts:
            rows = await wanted.rows(parts, rollout)
            for row in rows.rows:
                await response.write(wanted.container.row(row, first=first))
                first = False
            if wanted.report:
                skipped += [{"rollout_id": rollout.rollout_id, **left} for left in rows.skipped]
        await response.write(wanted.container.closing({"skipped": skipped} if wanted.report else None))
        await response.write_eof()
    except ClientConnectionResetError:
        pass  # nobody reads on
    return response


class Wanted:
    """What an export is asked for."""

    __slots__ = ("container", "form", "options", "report")

    def __init__(self, request: web.Request) -> None:
        """Raises BadCall for an option that is unknown or not allowed, naming those that are."""
        self.form: Format = FORMATS[choice_of(request, "format", FORMATS, "sequences")]
        self.report = choice_of(request, "report", ("true", "false"), "false") == "true"
        try:
            self.container: Container = container_for(request.headers.get("Accept"), request.query.get("container"))
        except ValueError as error:
            raise BadCall(str(error), param="container") from None
        chosen = {
            "branches": choice_of(request, "branches", ("all", "longest", "last"), "all"),
            "include": choice_of(request, "include", ("exact", "flagged"), "exact"),
            "overlong": choice_of(request, "overlong", ("cut", "drop", "keep"), "cut"),
        }
        self.options = Options(**cast("Any", chosen), max_len=number_of(request, "max_len", None, least=1))

    async def rows(self, parts: Parts, rollout: Rollout) -> Rows:
        """The rows of one rollout; of a long one they are made beside the event loop."""
        steps, marks = await read_steps(parts, rollout, whole=False)
        facts = facts_of(rollout, marks)
        if len(steps) < _RENDER_IN_THREAD_FROM_STEPS:
            return self.form.rows(facts, steps, self.options)
        return await asyncio.to_thread(self.form.rows, facts, steps, self.options)

    def render(self, rows: Rows) -> bytes:
        """All rows in their container."""
        parts = [self.container.row(row, first=at == 0) for at, row in enumerate(rows.rows)]
        report: Mapping[str, Any] | None = {"skipped": rows.skipped} if self.report else None
        return b"".join([self.container.opening(self.form.name), *parts, self.container.closing(report)])


async def _rollouts(request: web.Request, parts: Parts) -> AsyncIterator[Rollout]:
    """The rollouts that a query asks for, newest first, in constant memory."""
    wanted = filter_of(request)
    limit = number_of(request, "limit", None, least=1)
    since = number_of(request, "since", None, least=0)
    given = 0
    async for name in parts.store.names():
        stored = await parts.store.look(name)
        if stored is None:
            continue  # deleted meanwhile
        if since is not None and stored.created_ms < since * 1000:
            return
        rollout = read_rollout(stored)
        if wanted(rollout):
            yield rollout
            given += 1
            if given == limit:
                return


def _told(skipped: Sequence[Mapping[str, str]]) -> str:
    """How many were left out and why, in a header's few words."""
    if not skipped:
        return "0; the rollout has no steps"
    reasons = Counter(left["why"] for left in skipped)
    return f"{len(skipped)}; " + ", ".join(f"{why} ({count})" for why, count in reasons.most_common(5))
