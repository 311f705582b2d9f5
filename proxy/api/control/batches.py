"""The routes of `/batches`: a consumer claims complete groups and acknowledges, extends or releases its lease on them.

A batch can be acknowledged or released through any process that shares the store. Repeated requests get the same response.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.claims import (
    Claim,
    fill,
    held_fields,
    normalize,
    observe,
    put_back,
    release,
    supersede_earlier,
    undo,
)
from proxy.api.control.export_query import export_query
from proxy.api.control.groups import drop_group
from proxy.api.control.schemas import AckBatch, ClaimBatch, ExtendBatch, ReleaseBatch
from proxy.api.http import CLIENT_CLOSED_REQUEST, json_response
from proxy.api.requests import body_from, named, rollout_id_from
from proxy.clock import new_id
from proxy.errors import Conflict, Damaged, LeaseLost, NotFound
from proxy.rollouts.group import Batch, Ending, read_batch, read_group, state_fields, write_batch
from proxy.rollouts.rollout import ClaimId, write_fields
from proxy.telemetry.logs import LOG
from storage.errors import FieldsChanged, StorageError
from storage.types import QueueCounts, QueuedGroup

_POLL_INTERVAL_S: Final = 0.2
_LEASE_PARTS: Final = 3  # a lease is extended after this part of it
_INTERVALS_MISSED: Final = 2  # without a heartbeat: one was due after the first, and the next one is


async def claim_batch(request: web.Request) -> web.Response:
    """`POST /batches/claim`: lease up to `groups` complete groups, or exactly as many; wait up to `wait_s` for them."""
    context = request.app[CONTEXT]
    body = await body_from(request, ClaimBatch)
    policy = context.policies.claimed(body.policy)
    query = replace(export_query(context, body), policy=policy.name)
    query = await query.begin(context)  # first, so that no group is leased if the engines that score it are unreachable
    by_default = "drop" if body.max_staleness is not None else context.settings.groups.earlier_epochs
    claim = Claim(new_id(context.clock), body, query, policy, (body.earlier_epochs or by_default) == "take")
    started = context.clock.monotonic()
    deadline = started + body.wait_s
    try:
        async with _leases_kept(context, claim):
            await _fill_in_time(request, context, claim, deadline)
            lease_ms = await _record(context, claim)
        waiting = await context.store.queue.counts(policy.name)
    except BaseException:
        await undo(context, claim, claim.held)
        raise
    for reason in claim.refused.values():
        context.metrics.refused_groups.labels(policy.name, reason.code).inc()
    if _is_disconnected(request):
        await undo(context, claim, claim.held)
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    await supersede_earlier(context, claim)
    context.metrics.claim_wait_seconds.labels(policy.name).observe(context.clock.monotonic() - started)
    await observe(context, claim)
    shown = {"policy": policy.name} if context.policies.has_named else {}
    return web.Response(body=_batch_json(claim, shown, lease_ms, waiting), content_type="application/json")


async def _fill_in_time(request: web.Request, context: Context, claim: Claim, deadline: float) -> None:
    """Poll for groups until one is leased, the deadline is over, or the client has disconnected.

    The interval is random, so that exact claims that compete for groups do not do so again at the same time. It is not shorter
    than a poll, which takes long if thousands of groups are refused.
    """
    others: dict[str, Batch] = {}
    while True:
        began = context.clock.monotonic()
        await _take_over(context, claim, others)
        await fill(context, claim)
        remaining_s = deadline - context.clock.monotonic()
        if claim.held or remaining_s <= 0 or _is_disconnected(request):
            return
        random_s = _POLL_INTERVAL_S * (0.75 + context.clock.entropy(1)[0] / 512)
        interval_s = max(random_s, context.clock.monotonic() - began)
        await asyncio.sleep(min(interval_s, remaining_s))


@asynccontextmanager
async def _leases_kept(context: Context, claim: Claim) -> AsyncIterator[None]:
    """Extend the leases of the claim's groups in the background, if they are scored: that can take longer than a lease."""
    if claim.query.rescoring is None:
        yield
        return
    keeping = asyncio.get_running_loop().create_task(_keep_leases(context, claim))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _keep_leases(context: Context, claim: Claim) -> None:
    lease_ms = claim.body.lease_ms
    while True:
        await asyncio.sleep(lease_ms / 1000 / _LEASE_PARTS)
        now_ms = context.clock.now_ms()
        fields = held_fields(claim.id, claim.body.consumer, now_ms + lease_ms)
        for held in tuple(claim.held):
            with suppress(StorageError):  # `_record` finds the groups whose leases expired
                await context.store.queue.extend(held.waiting, claim.batch_id, fields, lease_ms=lease_ms, now_ms=now_ms)


async def _take_over(context: Context, claim: Claim, others: dict[str, Batch]) -> None:
    """Release the groups of other instances of the consumer that missed a heartbeat, and end their batches.

    A heartbeat is missed if the next one is due as well. `others` has the batches that this claim has read before.
    """
    consumer, instance = claim.body.consumer, claim.body.instance
    if instance is None:
        return
    silences = await context.store.queue.holders(claim.policy.name)
    found = await asyncio.gather(*(context.store.batches.get(name) for name in silences.keys() - others.keys()))
    others |= {stored.name: read_batch(stored) for stored in found if stored is not None}
    for name, silence_ms in silences.items():
        batch = others.get(name)
        if batch is None or batch.consumer != consumer or batch.instance in (None, instance) or not batch.heartbeat_ms:
            continue
        if silence_ms >= (limit_ms := _INTERVALS_MISSED * batch.heartbeat_ms):
            await _end_silent(context, batch, instance, limit_ms)


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


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _record(context: Context, claim: Claim) -> int | None:
    """Store the groups of the batch under its ID; return when its lease ends, in unix milliseconds.

    The lease starts now, after rendering. Groups that another consumer claimed meanwhile are not part of the batch; an exact
    claim then has no batch.
    """
    lease_ms = claim.body.lease_ms
    while True:
        await normalize(context, claim)
        now_ms = context.clock.now_ms()
        fields = held_fields(claim.id, claim.body.consumer, now_ms + lease_ms)
        has = [
            await context.store.queue.extend(
                held.waiting,
                claim.batch_id,
                fields | held.delivered_to(claim.body.consumer),
                lease_ms=lease_ms,
                now_ms=now_ms,
            )
            for held in claim.held
        ]
        if all(has):
            break
        await undo(context, claim, list(compress(claim.held, map(not_, has))))
        claim.held = list(compress(claim.held, has))  # advantages over the batch change without the lost groups
    if claim.body.exact and claim.missing:
        await put_back(context, claim)
    if not claim.held:
        return None
    body, entries = claim.body, [held.waiting for held in claim.held]
    heartbeat_ms = None if body.heartbeat_s is None else max(1, round(body.heartbeat_s * 1000))
    batch = write_batch(body.consumer, claim.policy.name, entries, instance=body.instance, heartbeat_ms=heartbeat_ms)
    await context.store.batches.open(claim.batch_id, batch, now_ms=now_ms)
    return now_ms + lease_ms


def _batch_json(claim: Claim, shown: Mapping[str, str], lease_ms: int | None, waiting: QueueCounts) -> bytes:
    """Return the batch as JSON, around groups that are JSON already. `waiting` counts groups that are not in the batch."""
    without = {"dropped": claim.dropped, "refused": claim.refused}
    fields = {
        "batch_id": claim.batch_id if claim.held else None,
        "consumer": claim.body.consumer,
        "format": claim.body.format,
        **shown,
        "policy_version": claim.announced.version,
        "policy_epoch": claim.announced.epoch,
        "lease_ms": lease_ms,
        "waiting": {"available": waiting.available, "claimed": max(0, waiting.claimed - len(claim.held))},
        **{
            kind: [{"group_id": group, "code": reason.code, "why": reason.why} for group, reason in found.items()]
            for kind, found in without.items()
        },
        "reasons": {kind: Counter(reason.code for reason in found.values()) for kind, found in without.items()},
    }
    return orjson.dumps(fields)[:-1] + b',"groups":[' + b",".join(held.rendered for held in claim.held) + b"]}"


async def ack_batch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/ack`: remove its groups from the queue. 409 if its lease on all of them has expired."""
    context = request.app[CONTEXT]
    ack = await body_from(request, AckBatch)
    batch = await _batch_from(request, ending="acked")
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
    """Return whether an earlier acknowledgement of this batch, whose response was lost, has removed the group."""
    stored = await context.store.groups.get(waiting.group)
    if stored is None:
        return True  # deleted: no other consumer can claim it
    fields = state_fields(batch.policy, status="done", batch_id=batch.batch_id)
    return all(stored.fields.get(name) == value for name, value in fields.items())


async def release_batch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/release`: return its groups to their positions in the queue."""
    context = request.app[CONTEXT]
    await body_from(request, ReleaseBatch)
    batch = await _batch_from(request, ending="released")
    if batch.answer is not None:
        return json_response(batch.answer)
    released = [entry.group for entry in batch.held if await release(context, batch.batch_id, entry)]
    context.metrics.group_events.labels(batch.policy, "released").inc(len(released))
    return await _end(context, batch, "released", {"released": released, "lost": _lost(batch, released)})


async def extend_batch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/extend`: renew the lease for `lease_s` from now. 409 if its lease on all groups has expired."""
    context = request.app[CONTEXT]
    extend = await body_from(request, ExtendBatch)
    batch = await _batch_from(request, ending=None)
    lease_ms, now_ms = extend.lease_ms, context.clock.now_ms()
    fields = held_fields(ClaimId(batch.policy, batch.batch_id), batch.consumer, now_ms + lease_ms)
    held = [
        waiting.group
        for waiting in batch.held
        if await context.store.queue.extend(waiting, batch.batch_id, fields, lease_ms=lease_ms, now_ms=now_ms)
    ]
    _check_any(batch, held)
    shown = {"batch_id": batch.batch_id, "lease_ms": now_ms + lease_ms, "held": held, "lost": _lost(batch, held)}
    return json_response(shown)


async def _batch_from(request: web.Request, *, ending: Ending | None) -> Batch:
    """Return the batch that the path names. Raises NotFound, or Conflict if it ended in another way."""
    name = rollout_id_from(request)
    stored = await request.app[CONTEXT].store.batches.get(name)
    if stored is None:
        raise NotFound(f"Batch {name!r} not found.", param="batch_id")
    batch = read_batch(stored)
    if batch.ended == "taken_over":
        raise LeaseLost(
            f"Batch {name!r} was taken over: another instance of consumer {batch.consumer!r} claims its groups, because this "
            f"one sent no heartbeat for {_INTERVALS_MISSED * (batch.heartbeat_ms or 0) / 1000:g} s. Do not train on them. "
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
