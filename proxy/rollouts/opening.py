"""Opening of rollouts by their calls, with a cache for the time when the store is unreachable.

With a journal, calls of cached rollouts continue while the store is unreachable. Rollouts with a limit of steps or tokens are
not cached: the limits cannot be enforced without the store.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.clock import Clock
from proxy.errors import StoreUnavailable
from proxy.rollouts.group import join
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.renewals import LEASE_MS
from proxy.rollouts.rollout import Rollout, checked_id, read_rollout, write_fields
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError, StoreUnreachable
from storage.store import Store
from storage.types import Announcement, Reservation

_MAX_CACHED = 10_000


class RolloutCache:
    """The most recently opened rollouts, by ID."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[str, Rollout] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RolloutCache {len(self._rollouts)}>"

    def put(self, rollout: Rollout) -> None:
        """Cache the latest state of a rollout."""
        self._rollouts.pop(rollout.rollout_id, None)
        if rollout.limits.max_steps is None and rollout.limits.max_tokens is None:
            self._rollouts[rollout.rollout_id] = rollout
        if len(self._rollouts) > _MAX_CACHED:
            self._rollouts.popitem(last=False)

    def get(self, rollout_id: str) -> Rollout | None:
        """Return the cached rollout, or None."""
        return self._rollouts.get(rollout_id)


class Announced(Protocol):
    """A value that one process announces to all processes through the store."""

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply newer announcements."""
        ...


class RolloutOpener:
    """Open the rollouts of calls."""

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
        """Return the rollout with this ID, which its first call creates and adds to the group.

        Raises:
            StoreUnavailable: The store is unreachable, and the rollout is not cached.
            BadRequest: The rollout cannot join the group.
        """
        if group_id is not None:
            checked_id(group_id, what="group id")
        started = self._clock.monotonic()
        try:
            if self._recorder.store_health.unreachable is not None:
                self._recorder.store_health.check()
            fields = {} if group_id is None else write_fields({"group_id": group_id})
            reservation = Reservation(step_id, LEASE_MS)
            stored = await self._store.open(rollout_id, fields, now_ms=self._clock.now_ms(), reservation=reservation)
            rollout = read_rollout(stored)
            if rollout.group_id is not None and not rollout.counts.get("steps"):
                await join(self._store, self._clock, stored, rollout.group_id)
        except StorageError as error:
            self._metrics.store_operation_failures.labels("open").inc()
            self._recorder.store_health.failed(error)
            if isinstance(error, StoreUnreachable) and (cached := self._cache.get(rollout_id)) is not None:
                return cached
            raise StoreUnavailable(f"The call was not sent because it cannot be recorded: {error}") from error
        finally:
            self._metrics.store_operation_duration_seconds.labels("open").observe(self._clock.monotonic() - started)
        if self._recorder.has_journal:
            self._cache.put(rollout)
        if stored.announcements:
            for announced in self._announced:
                announced.apply(stored.announcements)
        return rollout
