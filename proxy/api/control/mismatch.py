"""The routes by which the ranks of a trainer report the sums of a batch's mismatch, and read what they mean together.

Parts can be reported through any process that shares the store, in any order and again.
"""

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.batches import batch_from
from proxy.api.control.schemas import PostMismatch
from proxy.api.http import json_response
from proxy.api.requests import body_from, rollout_id_from
from proxy.errors import NotFound, UnprocessableRequest
from proxy.rollouts.group import Batch, read_group
from proxy.rollouts.mismatch import (
    ALL,
    Report,
    Rules,
    Sums,
    Verdict,
    count_part,
    described,
    mean_size,
    part_from,
    read_report,
    tokens_of,
    verdicts_of,
)
from proxy.rollouts.policy import read_announced
from proxy.trajectory.facts import number_of
from proxy.upstream.concurrency import in_thread

_AT_ONCE: Final = 250  # rollouts that are read; 20,000 at once would block other requests


async def post_mismatch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/mismatch`: count a part once. 409 if it overlaps another one, or the batch was released."""
    context = request.app[CONTEXT]
    body = await body_from(request, PostMismatch)
    batch = await _reported(request, body.policy)
    part, sums = await in_thread(part_from, body.rank, body.rows, body.sums)
    await _check_version(context, batch, body.policy_version, sums)
    await _check_rows(context, batch, body.rows)
    given, now_ms = Report(batch.policy, body.policy_version, (part,), sums), context.clock.now_ms()
    before, report = await count_part(context.store, batch.batch_id, given, now_ms=now_ms)
    known, verdicts = await in_thread(_judged, context, before, report)
    if report is not before:
        _measure(context, given, {each.verdict for each in verdicts} - {each.verdict for each in known})
    return json_response({**_shown(batch.batch_id, report, verdicts), "counted": report is not before})


def _judged(context: Context, *reports: Report | None) -> list[list[Verdict]]:
    rules = Rules(**dict(context.settings.mismatch))
    return [[] if report is None else verdicts_of(report.sums, rules) for report in reports]


def _measure(context: Context, part: Report, verdicts: set[str]) -> None:
    """Count the mean of a part, and the verdicts that it brought about."""
    mean = mean_size(part.sums["cells"][ALL].get(ALL))
    if mean is not None:
        context.metrics.mismatch_abs_mean.labels(part.policy).observe(mean)
    for verdict in verdicts:
        context.metrics.mismatch_verdicts.labels(part.policy, verdict).inc()


async def show_mismatch(request: web.Request) -> web.Response:
    """`GET /batches/{id}/mismatch`: the sums of all parts, their means and the verdicts."""
    context, name = request.app[CONTEXT], rollout_id_from(request)
    report = await read_report(context.store, name)
    if report is None:
        raise NotFound(f"Batch {name!r} has no mismatch: no part of it was reported.", param="batch_id")
    return json_response(await in_thread(_described, context, name, report))


def _described(context: Context, name: str, report: Report) -> dict[str, Any]:
    (verdicts,) = _judged(context, report)
    return {**_shown(name, report, verdicts), **described(report.sums), "sums": report.sums}


def _shown(batch_id: str, report: Report, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "batch_id": batch_id,
        "policy": report.policy,
        "policy_version": report.version,
        "parts": [{"rank": part.rank, "rows": len(part.rows)} for part in report.parts],
        "tokens": tokens_of(report.sums),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
    }


async def _reported(request: web.Request, policy: str | None) -> Batch:
    """Return the batch of a report: a claimed one, or one without groups if the report names a policy.

    Raises UnprocessableRequest if there is none, or it is of another policy.
    """
    context = request.app[CONTEXT]
    try:
        try:
            batch = await batch_from(request, ending="acked")
        except NotFound:
            if policy is None:
                raise
            batch = Batch(rollout_id_from(request), "", (), policy)
        context.policies.named(batch.policy)
    except NotFound as unknown:
        raise UnprocessableRequest(unknown.message, param=unknown.param) from None
    if policy not in (None, batch.policy):
        raise UnprocessableRequest(
            f"Batch {batch.batch_id!r} is of policy {batch.policy!r}, not {policy!r}.", param="policy"
        )
    return batch


async def _check_version(context: Context, batch: Batch, version: str, sums: Sums) -> None:
    """Raise UnprocessableRequest for a version that was not announced yet, and that no token has."""
    announced = read_announced(await context.store.announcements.read(), batch.policy)
    if announced.version is None or version == announced.version or "0" in sums["cells"]["lag"]:
        return
    number, highest = number_of(version), announced.highest
    if number is None or highest is None or number > highest:
        raise UnprocessableRequest(
            f"policy_version {version!r} is unknown: policy {batch.policy!r} has version {announced.version!r}. Send the "
            "version of the weights of the forward pass, as it was announced.",
            param="policy_version",
        )


async def _check_rows(context: Context, batch: Batch, rows: Mapping[str, Any]) -> None:
    """Raise UnprocessableRequest for a rollout that is in no group of the batch, unless one was deleted since.

    Rollouts of a batch without groups must exist.
    """
    if names := [waiting.group for waiting in batch.held]:
        found = await context.store.groups.get_all(names, with_marks=True)
        groups = [read_group(*entry) for entry in found if entry is not None]
        if len(groups) < len(names):
            return
        members = {name for group in groups for name in group.members}
        why = f"is not in batch {batch.batch_id!r}"
    else:
        members, why, given = set(), "does not exist", list(rows)
        for start in range(0, len(given), _AT_ONCE):
            read = await context.store.get_each(given[start : start + _AT_ONCE])
            members |= {stored.name for stored in read if stored is not None}
    stranger = next((name for name in rows if name not in members), None)
    if stranger is not None:
        raise UnprocessableRequest(f"Rollout {stranger!r} {why}.", param="rows")
