"""The export routes: rows for trainers, of one rollout or streamed over many.

Rollouts are written one after the other, with a few read ahead, and row by row: memory does not grow with their number.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.context import CONTEXT, Context
from proxy.api.control.export_query import ExportQuery, Planned, export_query_from
from proxy.api.control.group_rows import GONE, without_rows
from proxy.api.control.outcomes import Outcome, outcome_alone
from proxy.api.control.schemas import ExportMany, ExportRollout
from proxy.api.failures import RESPONSE_STARTED
from proxy.api.requests import rollout_from
from proxy.errors import Conflict, Damaged, NotFound, ProxyError
from proxy.export import Inexpressible, Plan
from proxy.export.containers import Writer
from proxy.rollouts.rollout import Rollout, left_out, read_rollouts
from proxy.rollouts.steps import LONG, aside
from proxy.telemetry.logs import LOG
from storage.errors import StorageError

_MAX_AHEAD = 4  # rollouts read while one is written,
_MAX_STEPS_AHEAD = 200  # unless they are long,
_MAX_SCORED_AHEAD = 16  # or are scored, which takes much longer than reading
_MAX_ROLLOUTS_READ = 16  # rollouts per read of their fields, in one round trip
_MAX_RENDERED = 256  # up to this weight, all rows of a rollout may be in memory at once: about 250,000 tokens


async def export_rollout(request: web.Request) -> web.StreamResponse:
    """`GET /rollouts/{id}/export?format=…`: the rows; `X-Export-Skipped` has the number of steps without rows, and why."""
    context = request.app[CONTEXT]
    query = await export_query_from(request, ExportRollout)[1].begin(context)
    outcome = await outcome_alone(context, query, await rollout_from(request))
    planned = await query.plan(context, outcome.rollout)
    plan = planned.plan
    report = {"skipped": plan.skipped, "rows": query.about(outcome.rollout, plan, outcome.raw)}
    try:
        # Each row is serialized before the next is made: all rows as Python lists would use several times the memory.
        pieces = await aside(planned.weight, lambda: list(query.pieces(plan.render(), report)))
    except Inexpressible as error:
        raise Conflict(str(error), param="format") from None
    response = web.StreamResponse(headers=skipped_header(plan.skipped, is_empty=not plan.trained))
    response.content_length = sum(map(len, pieces))
    return await _written_to(request, response, query, pieces)


async def export_many(request: web.Request) -> web.StreamResponse:
    """`GET /export?format=…&status=&group_id=&since=&limit=`: rollouts newest first, streamed as they are read."""
    context = request.app[CONTEXT]
    asked, query = export_query_from(request, ExportMany)
    query = await query.begin(context)
    unreadable: list[dict[str, Any]] = []
    async with aclosing(_pieces(context, query, _rollouts(context, asked, unreadable), unreadable)) as pieces:
        first = await anext(pieces)  # errors before this point still get their own status
        return await _written_to(request, web.StreamResponse(), query, [first], pieces)


async def _written_to(
    request: web.Request,
    response: web.StreamResponse,
    query: ExportQuery,
    pieces: Iterable[bytes],
    more: AsyncIterable[bytes] | None = None,
) -> web.StreamResponse:
    """Write `pieces`, then `more`. An error after the first piece closes the connection, so the body does not look complete."""
    response.content_type = query.container.content_type
    await response.prepare(request)
    if request.method == "HEAD":
        return response  # a body would be read as the next response of the connection
    request[RESPONSE_STARTED] = True
    try:
        for piece in pieces:
            await response.write(piece)
        if more is not None:
            async for piece in more:
                await response.write(piece)
        await response.write_eof()
    except ClientConnectionResetError:
        pass  # the client disconnected
    except (ProxyError, StorageError) as error:
        LOG.error("Export aborted", extra={"fields": {"why": str(error)}})
        raise
    return response


async def _pieces(
    context: Context, query: ExportQuery, rollouts: AsyncIterator[Rollout], unreadable: Sequence[Mapping[str, Any]]
) -> AsyncGenerator[bytes, None]:
    """Write an export of many rollouts: at least one piece, and the first has the first row, if there is any.

    `unreadable` has the entries of the report for those that `rollouts` omitted.
    """
    skipped: list[dict[str, Any]] = []
    described: list[dict[str, Any]] = []
    writer = query.writer()
    ahead = writer.opening()
    async with aclosing(_read_ahead(context, query, rollouts)) as found:
        async for outcome, planned in found:
            plan, rollout = planned.plan, outcome.rollout
            async with aclosing(_written(query, planned, writer)) as pieces:
                async for text in pieces:
                    piece, ahead = ahead + text, b""
                    if piece:
                        yield piece
            if query.report:
                described += query.about(rollout, plan, outcome.raw)
                skipped += [{"rollout_id": rollout.rollout_id, **entry} for entry in plan.skipped]
    yield ahead + writer.closing({"skipped": [*skipped, *unreadable], "rows": described} if query.report else None)


async def _written(query: ExportQuery, planned: Planned, writer: Writer) -> AsyncGenerator[bytes, None]:
    """Write the rows of one rollout; those that take milliseconds are made and written in a thread."""
    rows = planned.plan.render()
    row_weight = planned.weight // max(1, len(planned.plan.trained))
    render_weight = 0 if planned.is_rendered else row_weight
    while (row := await aside(render_weight, lambda: next(rows, None))) is not None:
        is_long = row_weight >= LONG if query.container.nests else writer.fills(row)
        yield await asyncio.to_thread(writer.row, row) if is_long else writer.row(row)


async def _read_ahead(
    context: Context, query: ExportQuery, rollouts: AsyncIterator[Rollout]
) -> AsyncGenerator[tuple[Outcome, Planned], None]:
    """Plan the rows of rollouts, in their order; while one is written, the next few are read from the store."""
    reading: deque[tuple[Rollout, asyncio.Task[tuple[Outcome, Planned]]]] = deque()
    ahead, most = 0, _MAX_AHEAD if query.rescoring is None else _MAX_SCORED_AHEAD
    try:
        async for upcoming in rollouts:
            reading.append((upcoming, asyncio.get_running_loop().create_task(_planned(context, query, upcoming))))
            ahead += upcoming.counts.get("steps", 0)
            while len(reading) > most or (len(reading) > 1 and ahead > _MAX_STEPS_AHEAD):
                rollout, task = reading.popleft()
                ahead -= rollout.counts.get("steps", 0)
                yield await task
        while reading:
            yield await reading.popleft()[1]
    finally:
        unfinished = [task for _, task in reading]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _planned(context: Context, query: ExportQuery, rollout: Rollout) -> tuple[Outcome, Planned]:
    """Plan the rows of one rollout of many. One that cannot be exported gets no rows, and a skipped entry with the reason.

    Planned rows are sure to render, since they are rendered here. The rows of a large rollout are rendered a second time when
    they are written, so that only one at a time is in memory.
    """
    outcome = Outcome(rollout)
    try:
        outcome = await outcome_alone(context, query, rollout)
        planned = await query.plan(context, outcome.rollout, max_rendered=_MAX_RENDERED)
        plan = planned.plan
        if not planned.is_rendered:
            await asyncio.to_thread(lambda: deque(plan.render(), maxlen=0))
        if not plan.trained:
            skipped = [*plan.skipped, {"why": without_rows(plan.skipped)}]
            planned = replace(planned, plan=replace(plan, skipped=skipped))
    except NotFound:
        why = GONE
    except Damaged as damage:
        left_out([damage], context.metrics)
        why = damage.message
    except (Conflict, Inexpressible) as error:
        why = str(error)
    else:
        return outcome, planned
    return outcome, Planned(Plan((), [{"why": why}], lambda: iter(())), 0)


async def _rollouts(context: Context, asked: ExportMany, unreadable: list[dict[str, Any]]) -> AsyncIterator[Rollout]:
    """Yield the rollouts that match, newest first, in constant memory.

    Those that are unreadable, which may match, are added to `unreadable`.
    """
    found, count = 0, min(_MAX_ROLLOUTS_READ, asked.limit or _MAX_ROLLOUTS_READ)
    async for names in _batches(context.store.names(), count):
        for stored in await asyncio.gather(*map(context.store.get, names)):
            rollouts, damaged = read_rollouts([stored], context.metrics)
            unreadable += damaged
            for rollout in rollouts:
                if asked.since is not None and rollout.created_ms < asked.since * 1000:
                    return
                if asked.matches(rollout):
                    yield rollout
                    found += 1
                    if found == asked.limit:
                        return


async def _batches(names: AsyncIterator[str], count: int) -> AsyncIterator[list[str]]:
    batch: list[str] = []
    async for name in names:
        batch.append(name)
        if len(batch) == count:
            yield batch
            batch = []
    yield batch


def skipped_header(skipped: Sequence[Mapping[str, Any]], *, is_empty: bool) -> dict[str, str]:
    """Return the header with the number of skipped steps and the reasons; no header if none were skipped."""
    if not skipped:
        return {"X-Export-Skipped": "0; the rollout has no steps"} if is_empty else {}
    reasons = Counter(entry["why"] for entry in skipped)
    counted = ", ".join(f"{why} ({count})" for why, count in reasons.most_common(5))
    return {"X-Export-Skipped": f"{len(skipped)}; {counted}"}
