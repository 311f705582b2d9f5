"""Exports: rows for trainers, of one rollout or of many.

Holds the streaming of rows: one rollout at a time, and a few read ahead, so that memory does not grow with how many there are.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.control.access import number_of, only_known, rollout_of
from proxy.control.rollouts import RolloutFilter, filter_of
from proxy.control.steps import aside
from proxy.control.wanted import EXPORT_OPTIONS, Wanted, wanted_by_query
from proxy.errors import Conflict, NotFound, ProxyError
from proxy.export import Rows
from proxy.logs import LOG
from proxy.parts import PARTS, SHOWN, Parts
from proxy.rollouts import Rollout, read_rollout
from storage.store import StorageError

_MOST_AHEAD = 4  # rollouts read while one is written,
_MOST_STEPS_AHEAD = 200  # unless they are long


async def export_rollout(request: web.Request) -> web.StreamResponse:
    """`GET /rollouts/{id}/export?format=…`: the rows; `X-Export-Skipped` tells how many steps gave none, and why."""
    only_known(request, EXPORT_OPTIONS)
    wanted = wanted_by_query(request)
    rollout = await rollout_of(request)
    rows = await wanted.rows(request.app[PARTS], rollout)
    body = await aside(len(rows.rows), lambda: wanted.render(rows.rows, rows.skipped))
    headers = skipped_header(rows.skipped, is_empty=not rows.rows)
    return web.Response(body=body, content_type=wanted.container.content_type, headers=headers)


async def export_many(request: web.Request) -> web.StreamResponse:
    """`GET /export?format=…&status=&group_id=&since=&limit=`: rollouts newest first, streamed as they are read."""
    only_known(request, (*EXPORT_OPTIONS, "status", "group_id", "since", "limit"))
    parts = request.app[PARTS]
    wanted = wanted_by_query(request)
    rollouts = _rollouts(
        parts,
        filter_of(request),
        limit=number_of(request, "limit", None, least=1),
        since=number_of(request, "since", None, least=0),
    )
    async with aclosing(_pieces(parts, wanted, rollouts)) as pieces:
        first = await anext(pieces)  # what fails up to here still has a status of its own
        response = web.StreamResponse(headers={"Content-Type": wanted.container.content_type})
        await response.prepare(request)
        request[SHOWN] = True  # from here on a failure cuts the connection: nobody takes the body for a whole one
        try:
            await response.write(first)
            async for piece in pieces:
                await response.write(piece)
            await response.write_eof()
        except ClientConnectionResetError:
            pass  # nobody reads on
        except (ProxyError, StorageError) as error:
            LOG.error("an export broke off", extra={"fields": {"why": str(error)}})
            raise
        return response


async def _pieces(parts: Parts, wanted: Wanted, rollouts: AsyncIterator[Rollout]) -> AsyncGenerator[bytes, None]:
    """An export of many rollouts, piece by piece: at least one, and the first has the first row, if there is any."""
    skipped: list[dict[str, str]] = []
    writer = wanted.writer()
    ahead = writer.opening()
    async with aclosing(_read_ahead(parts, wanted, rollouts)) as found:
        async for rollout, rows in found:
            for row in rows.rows:
                said = await asyncio.to_thread(writer.row, row) if writer.fills(row) else writer.row(row)
                piece, ahead = ahead + said, b""
                if piece:
                    yield piece
            if wanted.report:
                skipped += [{"rollout_id": rollout.rollout_id, **left} for left in rows.skipped]
    yield ahead + writer.closing({"skipped": skipped} if wanted.report else None)


async def _read_ahead(
    parts: Parts, wanted: Wanted, rollouts: AsyncIterator[Rollout]
) -> AsyncGenerator[tuple[Rollout, Rows], None]:
    """The rows of rollouts, in their order; while one is written, the store is asked for the next few."""
    reading: deque[tuple[Rollout, asyncio.Task[Rows]]] = deque()
    ahead = 0
    try:
        async for next_one in rollouts:
            reading.append((next_one, asyncio.get_running_loop().create_task(wanted.rows(parts, next_one))))
            ahead += _steps(next_one)
            while len(reading) > _MOST_AHEAD or (len(reading) > 1 and ahead > _MOST_STEPS_AHEAD):
                rollout, task = reading.popleft()
                ahead -= _steps(rollout)
                if (rows := await _rows(task)) is not None:
                    yield rollout, rows
        while reading:
            rollout, task = reading.popleft()
            if (rows := await _rows(task)) is not None:
                yield rollout, rows
    finally:
        left = [task for _, task in reading]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _rows(reading: "asyncio.Task[Rows]") -> Rows | None:
    """The rows of one rollout, None if it was deleted meanwhile. One that cannot be said does not keep back the others."""
    try:
        return await reading
    except NotFound:
        return None
    except Conflict as refusal:
        return Rows([], [{"why": refusal.message}])


def _steps(rollout: Rollout) -> int:
    return rollout.counts.get("steps", 0)


async def _rollouts(
    parts: Parts, wanted: RolloutFilter, *, limit: int | None, since: int | None
) -> AsyncIterator[Rollout]:
    """The rollouts that a query asks for, newest first, in constant memory. `since` is unix seconds."""
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


def skipped_header(skipped: Sequence[Mapping[str, str]], *, is_empty: bool) -> dict[str, str]:
    """The header that says how many were left out and why, in few words; none where nothing is to be said."""
    if not skipped:
        return {"X-Export-Skipped": "0; the rollout has no steps"} if is_empty else {}
    reasons = Counter(left["why"] for left in skipped)
    told = ", ".join(f"{why} ({count})" for why, count in reasons.most_common(5))
    return {"X-Export-Skipped": f"{len(skipped)}; {told}"}
