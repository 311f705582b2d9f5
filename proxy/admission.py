"""The admission of a call: its rollout is opened, a pause is waited for, the guards are passed.

Holds what stands between a call that was read and a call that is made. Must not know what the call asks.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy import naming
from proxy.errors import LimitReached, StoreFault
from proxy.guards import GUARDS
from proxy.membership import join
from proxy.parts import Parts
from proxy.places import LEASE_MS
from proxy.rollouts import Rollout, read_rollout, write_fields
from storage.errors import FieldsChanged, StorageError, StoreUnreachable
from storage.types import Reservation


@asynccontextmanager
async def admitted(parts: Parts, rollout_id: str, group_id: str | None, step_id: str) -> AsyncIterator[Rollout]:
    """Its rollout, once nothing holds a call, which is in flight then. Raises Paused."""
    while True:
        rollout = await open_rollout(parts, rollout_id, group_id, step_id)
        lifetime = parts.lifetimes.kept(rollout.rollout_id, rollout.incarnation, rollout.group_id, rollout.origin)
        async with parts.places.kept(rollout, step_id):
            with lifetime:
                if await parts.pause.passed():
                    continue  # opened anew: the policy is another one now
                with parts.pause.counted():
                    yield rollout
                    return


async def open_rollout(parts: Parts, rollout_id: str, group_id: str | None, step_id: str) -> Rollout:
    """The rollout of this id, which comes into being with its first call, and joins its group. Raises StoreFault."""
    if group_id is not None:
        naming.checked_id(group_id, what="group id")
    started = parts.clock.monotonic()
    try:
        parts.recorder.standing.check()
        fields, reservation = write_fields({"group_id": group_id}), Reservation(step_id, LEASE_MS)
        stored = await parts.store.open(rollout_id, fields, now_ms=parts.clock.now_ms(), reservation=reservation)
        rollout = read_rollout(stored)
        if rollout.group_id is not None and not rollout.counts.get("steps"):
            await join(parts.store, parts.clock, stored, rollout.group_id)
    except StorageError as error:
        parts.metrics.store_operation_failures.labels("open").inc()
        parts.recorder.standing.failed(error)
        if isinstance(error, StoreUnreachable) and (remembered := parts.remembered.find(rollout_id)) is not None:
            return remembered
        raise StoreFault(f"the call could not be recorded, so it was not made: {error}") from error
    finally:
        parts.metrics.store_operation_duration_seconds.labels("open").observe(parts.clock.monotonic() - started)
    parts.policy.told(stored.announcements)
    parts.fleet.told(stored.announcements)
    if parts.recorder.spooled is not None:
        parts.remembered.keep(rollout)
    parts.pause.told(stored.announcements)
    return rollout


async def guard(parts: Parts, rollout: Rollout) -> None:
    """Pass every guard; a rollout that has reached a limit is marked so."""
    try:
        for check in GUARDS:
            check(rollout, parts.clock.now_ms())
    except LimitReached:
        if rollout.status == "open":
            await _mark_limited(parts, rollout.rollout_id)
        raise


async def _mark_limited(parts: Parts, rollout_id: str) -> None:
    try:
        fields = write_fields({"status": "limited"})
        await parts.store.update_if(rollout_id, fields, expect={"status": None}, now_ms=parts.clock.now_ms())
    except FieldsChanged:
        pass  # somebody finished or marked it meanwhile
    except StorageError as error:
        raise StoreFault(f"the store cannot be reached: {error}") from error
