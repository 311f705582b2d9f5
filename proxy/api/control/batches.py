"""The routes by which a consumer acknowledges or releases a batch, extends its lease, or reports its mismatch; the take-over.

Each can be requested from any process that shares the store. Repeated requests get the same response; the ranks of a trainer
report their parts of the mismatch in any order.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, Final

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.groups import drop_group
from proxy.api.control.schemas import AckBatch, ExtendBatch, PostMismatch, ReleaseBatch
from proxy.api.requests import body_from, json_response, named, rollout_id_from
from proxy.errors import Conflict, Damaged, LeaseLost, NotFound, UnprocessableRequest
from proxy.rollouts.group import Batch, Ending, read_batch, read_group, state_fields
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
from proxy.rollouts.rollout import ClaimId, write_fields
from proxy.telemetry.logs import LOG
from proxy.trajectory.facts import number_of
from proxy.upstream.concurrency import in_thread
from storage.errors import FieldsChanged
from storage.types import QueuedGroup

INTERVALS_MISSED: Final = 2  # without a heartbeat: one was due after the first, and the next one is
_AT_ONCE: Final = 250  # rollouts that are read; 20,000 at once would block other requests
UNHELD: Final = ("batch_id", "consumer", "lease_ms")  # what a group has only while it is leased


def held_fields(claim: ClaimId, consumer: str, until_ms: int) -> dict[str, bytes | None]:
    """Return the fields of a group that is leased."""
    return state_fields(claim.policy, status="claimed", batch_id=claim.batch_id, consumer=consumer, lease_ms=until_ms)


async def release(
    context: Context,
    batch_id: str,
    waiting: QueuedGroup,
    undone: Mapping[str, bytes | None] | None = None,
    *,
    silent_ms: int = 0,
) -> bool:
    """Return a leased group to the queue; return whether it was leased, and its batch not extended for `silent_ms`."""
    fields = {**state_fields(waiting.queue, status="complete", **dict.fromkeys(UNHELD)), **(undone or {})}
    now_ms = context.clock.now_ms()
    return await context.store.queue.release(waiting, batch_id, fields, now_ms=now_ms, silent_ms=silent_ms)


def watch_of(consumer: str, instance: str | None, heartbeat_ms: int | None) -> tuple[str, int] | None:
    """Return how the heartbeats of a batch are watched, for `take_over`; None if they are not."""
    return None if instance is None or heartbeat_ms is None else (consumer, INTERVALS_MISSED * heartbeat_ms)


async def take_over(context: Context, consumer: str, instance: str, policy: str, names: Sequence[str]) -> None:
    """Release the groups of those batches that other instances of a consumer hold which missed a heartbeat, and end them.

    A heartbeat is missed if the next one is due as well.
    """
    for name, stored in zip(names, await context.store.batches.get_each(names), strict=True):
        batch = None if stored is None else read_batch(stored)
        if batch is None or batch.ended is not None:
            await context.store.queue.forget(consumer, name, policy)
        elif batch.instance != instance and batch.heartbeat_ms:
            await _end_silent(context, batch, instance, INTERVALS_MISSED * batch.heartbeat_ms)


async def _end_silent(context: Context, batch: Batch, instance: str, limit_ms: int) -> None:
    """End a batch and release its groups, unless its lease is extended meanwhile: the first group decides for all."""
    for waiting in batch.held:
        if await release(context, batch.batch_id, waiting, silent_ms=limit_ms):
            break
    else:
        return
    with suppress(FieldsChanged):  # it ended otherwise meanwhile
        fields = write_fields({"ended": "taken_over"})
        now_ms = context.clock.now_ms()
        await context.store.batches.update_if(batch.batch_id, fields, expect={"ended": None}, now_ms=now_ms)
    for waiting in batch.held:
        await release(context, batch.batch_id, waiting)
    shown = {**named(batch, "batch_id", "consumer", "instance"), "taken_over_by": instance}
    LOG.warning("Batch taken over from an instance of its consumer that missed a heartbeat", extra={"fields": shown})


async def ack_batch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/ack`: remove its groups from the queue. 409 if its lease on all of them has expired."""
    context = request.app[CONTEXT]
    ack = await body_from(request, AckBatch)
    batch = await batch_from(request, ending="acked")
    if batch.answer is not None:
        return json_response(batch.answer)
    fields = state_fields(batch.policy, status="done", batch_id=batch.batch_id)
    done: list[str] = []
    for waiting in batch.held:
        removed = await context.store.queue.remove(waiting, batch.batch_id, fields, now_ms=context.clock.now_ms())
        done += [waiting.group] if removed or await _was_done(context, batch, waiting) else []
    _check_any(batch, done)
    kept = [name for name in done if not await _delete(context, name)] if ack.delete else []
    context.metrics.group_events.labels(batch.policy, "done").inc(len(done))
    return await _end(
        context, batch, "acked", {"acked": done, "lost": _lost(batch, done), **({"kept": kept} if kept else {})}
    )


async def _delete(context: Context, group_id: str) -> bool:
    """Delete a group, unless a policy still has it in its queue; return whether it is deleted.

    Each acknowledgement removes its own entry before, so that the last one deletes the group.
    """
    stored = await context.store.groups.get(group_id)
    if stored is not None:
        try:
            statuses = {state.status for state in read_group(stored).states.values()}
        except Damaged:
            return False
        if statuses & {"complete", "claimed"}:
            return False
        await drop_group(context, group_id)
    return True


async def _was_done(context: Context, batch: Batch, waiting: QueuedGroup) -> bool:
    """Return whether an earlier acknowledgement of this batch has removed the group; its response was lost."""
    stored = await context.store.groups.get(waiting.group)
    if stored is None:
        return True  # deleted: no other consumer can claim it
    fields = state_fields(batch.policy, status="done", batch_id=batch.batch_id)
    return all(stored.fields.get(name) == value for name, value in fields.items())


async def release_batch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/release`: return its groups to their positions in the queue."""
    context = request.app[CONTEXT]
    await body_from(request, ReleaseBatch)
    batch = await batch_from(request, ending="released")
    if batch.answer is not None:
        return json_response(batch.answer)
    released = [entry.group for entry in batch.held if await release(context, batch.batch_id, entry)]
    context.metrics.group_events.labels(batch.policy, "released").inc(len(released))
    return await _end(context, batch, "released", {"released": released, "lost": _lost(batch, released)})


async def extend_batch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/extend`: renew the lease for `lease_s` from now. 409 if its lease on all groups has expired."""
    context = request.app[CONTEXT]
    extend = await body_from(request, ExtendBatch)
    batch = await batch_from(request, ending=None)
    lease_ms, now_ms = extend.lease_ms, context.clock.now_ms()
    fields = held_fields(ClaimId(batch.policy, batch.batch_id), batch.consumer, now_ms + lease_ms)
    entries = dict.fromkeys(batch.held, fields)
    watch = watch_of(batch.consumer, batch.instance, batch.heartbeat_ms)
    has = await context.store.queue.extend(entries, batch.batch_id, lease_ms=lease_ms, now_ms=now_ms, watch=watch)
    held = [waiting.group for waiting in compress(entries, has)]
    _check_any(batch, held)
    shown = {"batch_id": batch.batch_id, "lease_ms": now_ms + lease_ms, "held": held, "lost": _lost(batch, held)}
    return json_response(shown)


async def batch_from(request: web.Request, *, ending: Ending | None) -> Batch:
    """Return the batch that the path names. Raises NotFound, or Conflict if it ended in another way."""
    name = rollout_id_from(request)
    stored = await request.app[CONTEXT].store.batches.get(name)
    if stored is None:
        raise NotFound(f"Batch {name!r} not found.", param="batch_id")
    batch = read_batch(stored)
    if batch.ended == "taken_over":
        raise LeaseLost(
            f"Batch {name!r} was taken over: another instance of consumer {batch.consumer!r} claims its groups, because this "
            f"one sent no heartbeat for {INTERVALS_MISSED * (batch.heartbeat_ms or 0) / 1000:g} s. Do not train on them. "
            "Consumers that run at the same time need different names.",
            param="batch_id",
        )
    if batch.ended not in (None, ending):
        raise Conflict(f"Batch {name!r} was already {batch.ended}.", param="batch_id")
    return batch


def _check_any(batch: Batch, held: list[str]) -> None:
    """Raise LeaseLost if the lease on all of its groups has expired."""
    if not held:
        raise LeaseLost(
            f"The lease of batch {batch.batch_id!r} expired, and another consumer claimed its "
            "groups. Claim again with a longer lease_s, or extend the lease in time.",
            param="batch_id",
        )


def _lost(batch: Batch, kept: list[str]) -> list[str]:
    return [waiting.group for waiting in batch.held if waiting.group not in kept]


async def _end(context: Context, batch: Batch, ended: Ending, answer: dict[str, Any]) -> web.Response:
    """Store the response for retries, and return it."""
    payload = {"batch_id": batch.batch_id, **answer}
    fields = write_fields({"ended": ended, "answer": payload})
    await context.store.batches.update_if(batch.batch_id, fields, expect={}, now_ms=context.clock.now_ms())
    return json_response(payload)


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
