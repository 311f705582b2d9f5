"""Rollouts as they stood when the store was last there.

Holds a bounded memory of terms, for calls that are made while a journal stands in for the store. Rule: what cannot be kept
without the store is not remembered. A rollout with a limit of steps or tokens is such a one, since nobody counts for it then;
so is one that was never met, since its terms are not known.
"""

from collections import OrderedDict

from proxy.api import rollout_id as naming
from proxy.api.context import Parts
from proxy.errors import StoreFault
from proxy.rollouts.group import join
from proxy.rollouts.reservations import LEASE_MS
from proxy.rollouts.rollout import Rollout, read_rollout, write_fields
from storage.errors import StorageError, StoreUnreachable
from storage.types import Reservation

_MOST = 10_000


class Remembered:
    """The rollouts met last, by id."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[str, Rollout] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Remembered {len(self._rollouts)}>"

    def keep(self, rollout: Rollout) -> None:
        """Remember how a rollout stands, in place of how it stood."""
        self._rollouts.pop(rollout.rollout_id, None)
        if rollout.limits.max_steps is None and rollout.limits.max_tokens is None:
            self._rollouts[rollout.rollout_id] = rollout
        if len(self._rollouts) > _MOST:
            self._rollouts.popitem(last=False)

    def find(self, rollout_id: str) -> Rollout | None:
        """How it stood, if that is remembered."""
        return self._rollouts.get(rollout_id)


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
