"""Exports: rows for trainers, of one rollout or of many.

Holds the reading of options, and the streaming of rows: one rollout at a time, so that memory does not grow with how many
there are.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from typing import Any, cast

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.control.access import choice_of, number_of, only_known, rollout_of
from proxy.control.rollouts import RolloutFilter, filter_of
from proxy.control.steps import aside, facts_of, read_steps
from proxy.errors import BadCall, Conflict, NotFound, ProxyError
from proxy.export import FORMATS, Fill, Format, Inexpressible, Rows
from proxy.export.containers import Container, Json, Ndjson, Writer, container_for
from proxy.logs import LOG
from proxy.parts import PARTS, SHOWN, Parts
from proxy.rollouts import Rollout, read_rollout
from proxy.trajectory.retokenize import RETOKENIZED, retokenize
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step
from storage.store import StorageError

_FILLS = ("prompt_logprob", "pad_id", "prompt_length", "response_length")
_OPTIONS = ("format", "branches", "include", "max_len", "overlong", "container", "report", *_FILLS)


async def export_rollout(request: web.Request) -> web.StreamResponse:
    """`GET /rollouts/{id}/export?format=…`: the rows; `X-Export-Skipped` tells how many steps gave none, and why."""
    only_known(request, _OPTIONS)
    wanted = Wanted(request)
    rollout = await rollout_of(request)
    rows = await wanted.rows(request.app[PARTS], rollout)
    body = await aside(len(rows.rows), lambda: wanted.render(rows))
    headers = {"X-Export-Skipped": _told(rows.skipped)} if rows.skipped or not rows.rows else {}
    return web.Response(body=body, content_type=wanted.container.content_type, headers=headers)


async def export_many(request: web.Request) -> web.StreamResponse:
    """`GET /export?format=…&status=&group_id=&since=&limit=`: rollouts newest first, streamed as they are read."""
    only_known(request, (*_OPTIONS, "status", "group_id", "since", "limit"))
    parts = request.app[PARTS]
    wanted = Wanted(request)
    rollouts = _rollouts(
        parts,
        filter_of(request),
        limit=number_of(request, "limit", None, least=1),
        since=number_of(request, "since", None, least=0),
    )
    pieces = _pieces(parts, wanted, rollouts)
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


async def _pieces(parts: Parts, wanted: "Wanted", rollouts: AsyncIterator[Rollout]) -> AsyncIterator[bytes]:
    """An export of many rollouts, piece by piece: at least one, and the first has the first row, if there is any."""
    skipped: list[dict[str, str]] = []
    writer = wanted.writer()
    ahead = writer.opening()
    async for rollout in rollouts:
        try:
            rows = await wanted.rows(parts, rollout)
        except NotFound:
            continue  # deleted meanwhile
        except Conflict as refusal:  # one rollout that cannot be said does not keep back the others
            rows = Rows([], [{"why": refusal.message}])
        for row in rows.rows:
            said = await asyncio.to_thread(writer.row, row) if wanted.is_slow else writer.row(row)
            piece, ahead = ahead + said, b""
            if piece:
                yield piece
        if wanted.report:
            skipped += [{"rollout_id": rollout.rollout_id, **left} for left in rows.skipped]
    yield ahead + writer.closing({"skipped": skipped} if wanted.report else None)


class Wanted:
    """What an export is asked for. `is_slow`: rows are gathered, and one that fills a batch takes a thread."""

    __slots__ = ("container", "fill", "form", "is_slow", "options", "report")

    def __init__(self, request: web.Request) -> None:
        """Raises BadCall for an option that is unknown or not allowed, naming those that are."""
        self.form: Format = FORMATS[choice_of(request, "format", FORMATS, "sequences")]
        self.report = choice_of(request, "report", ("true", "false"), "false") == "true"
        named = request.query.get("container")
        try:
            self.container: Container = container_for(request.headers.get("Accept"), named)
        except ValueError as error:
            raise BadCall(str(error), param="container") from None
        self.is_slow = not isinstance(self.container, Json | Ndjson)
        chosen = {
            "branches": choice_of(request, "branches", ("all", "longest", "last"), "all"),
            "include": choice_of(request, "include", ("exact", "flagged", RETOKENIZED), "exact"),
            "overlong": choice_of(request, "overlong", ("cut", "drop", "keep"), "cut"),
        }
        self.options = Options(**cast("Any", chosen), max_len=number_of(request, "max_len", None, least=1))
        self.fill = Fill(
            prompt_logprob=_logprob_of(request, "prompt_logprob"),
            pad_id=number_of(request, "pad_id", 0, least=0) or 0,
            prompt_length=number_of(request, "prompt_length", None, least=1),
            response_length=number_of(request, "response_length", None, least=1),
        )

    async def rows(self, parts: Parts, rollout: Rollout) -> Rows:
        """The rows of one rollout.

        Raises Conflict if the format cannot say it, NotFound if it was deleted meanwhile, DamagedStep, or StorageError.
        """
        retokenized = self.options.include == RETOKENIZED
        steps, marks = await read_steps(parts, rollout, whole=retokenized or self.form.whole)
        if retokenized:
            steps = await _retokenized(parts, steps)
        # Loading a tokenizer takes seconds and may fail: only where a text is told.
        decode = await _decode(parts, steps) if "full_text" in self.form.columns else None
        fill = replace(self.fill, decode=decode)
        try:
            return await aside(len(steps), lambda: self.form.rows(facts_of(rollout, marks), steps, self.options, fill))
        except Inexpressible as refusal:
            raise Conflict(str(refusal), param="format") from None

    def writer(self) -> Writer:
        """A writer for one export. Raises BadCall where what it needs is not installed."""
        try:
            return self.container.writer(self.form)
        except ValueError as error:
            raise BadCall(str(error), param="container") from None

    def render(self, rows: Rows) -> bytes:
        """All rows in their container."""
        writer = self.writer()
        report: Mapping[str, Any] | None = {"skipped": rows.skipped} if self.report else None
        return b"".join([writer.opening(), *map(writer.row, rows.rows), writer.closing(report)])


async def _decode(parts: Parts, steps: Sequence[Step]) -> Callable[[Sequence[int]], str] | None:
    """What makes text of these steps' ids: the tokenizer of the one endpoint that they came from."""
    names = {step.engine.name for step in steps}
    tokenizer = await parts.tokenizers.of(names.pop()) if len(names) == 1 else None
    return tokenizer.decode if tokenizer else None


def _logprob_of(request: web.Request, name: str) -> float | None:
    """A query parameter that is a number. Raises BadCall."""
    given = request.query.get(name)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise BadCall(f"{name} must be a number, not {given!r}", param=name)
    return value


async def _retokenized(parts: Parts, steps: Sequence[Step]) -> list[Step]:
    """The steps, with ids made for those that have none, by the tokenizers of their endpoints. Raises NotValid."""
    names = {step.engine.name for step in steps}
    tokenizers = {name: tokenizer for name in names if (tokenizer := await parts.tokenizers.of(name)) is not None}

    def made() -> list[Step]:
        return [
            retokenize(step, tokenizers[step.engine.name]) if step.engine.name in tokenizers else step for step in steps
        ]

    return await asyncio.to_thread(made)


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


def _told(skipped: Sequence[Mapping[str, str]]) -> str:
    """How many were left out and why, in a header's few words."""
    if not skipped:
        return "0; the rollout has no steps"
    reasons = Counter(left["why"] for left in skipped)
    return f"{len(skipped)}; " + ", ".join(f"{why} ({count})" for why, count in reasons.most_common(5))
