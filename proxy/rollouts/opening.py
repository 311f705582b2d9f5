"""Rollouts as they stood when the store was last there.

Holds a bounded memory of terms, for calls that are made while a journal stands in for the store. Rule: what cannot be kept
without the store is not remembered. A rollout with a limit of steps or tokens is such a one, since nobody counts for it then;
so is one that was never met, since its terms are not known.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.clock import Clock
from proxy.errors import StoreFault
from proxy.rollouts.group import join
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.reservations import LEASE_MS
from proxy.rollouts.rollout import Rollout, checked_id, read_rollout, write_fields
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError, StoreUnreachable
from storage.store import Store
from storage.types import Announcement, Reservation

_MAX_CACHED = 10_000


class RolloutCache:
    """The rollouts met last, by id."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[str, Rollout] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RolloutCache {len(self._rollouts)}>"

    def keep(self, rollout: Rollout) -> None:
        """Remember how a rollout stands, in place of how it stood."""
        self._rollouts.pop(rollout.rollout_id, None)
        if rollout.limits.max_steps is None and rollout.limits.max_tokens is None:
            self._rollouts[rollout.rollout_id] = rollout
        if len(self._rollouts) > _MAX_CACHED:
            self._rollouts.popitem(last=False)

    def find(self, rollout_id: str) -> Rollout | None:
        """How it stood, if that is remembered."""
        return self._rollouts.get(rollout_id)


class Announced(Protocol):
    """A value that one process announces to all through the store."""

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Take over what is newer."""
        ...


class RolloutOpener:
    """Opens the rollouts of calls."""

    def __init__(
        self, store: Store, clock: Clock, metrics: Metrics, recorder: Recorder, announced: Sequence[Announced]
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._recorder = recorder
        self._announced = announced
        self._cache = RolloutCache()

    async def open(self, rollout_id: str, group_id: str | None, step_id: str) -> Rollout:
        """Return the rollout with this id, created by its first call; it joins its group. Raises StoreFault, BadCall."""
        if group_id is not None:
            checked_id(group_id, what="group id")
        started = self._clock.monotonic()
        try:
            self._recorder.store_health.check()
            fields, reservation = write_fields({"group_id": group_id}), Reservation(step_id, LEASE_MS)
            stored = await self._store.open(rollout_id, fields, now_ms=self._clock.now_ms(), reservation=reservation)
            rollout = read_rollout(stored)
            if rollout.group_id is not None and not rollout.counts.get("steps"):
                await join(self._store, self._clock, stored, rollout.group_id)
        except StorageError as error:
            self._metrics.store_operation_failures.labels("open").inc()
            self._recorder.store_health.failed(error)
            if isinstance(error, StoreUnreachable) and (cached := self._cache.find(rollout_id)) is not None:
                return cached
            raise StoreFault(f"the call could not be recorded, so it was not made: {error}") from error
        finally:
            self._metrics.store_operation_duration_seconds.labels("open").observe(self._clock.monotonic() - started)
        if self._recorder.journaled is not None:
            self._cache.keep(rollout)
        for announced in self._announced:
            announced.apply(stored.announcements)
        return rollout
