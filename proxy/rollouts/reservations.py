"""Step reservations of calls in flight, for rollouts with a limit of steps.

A call leases a reservation from its admission on, and releases it if it is never sent. A call that is sent has a step, which
takes the reservation over in the store.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from proxy.rollouts.rollout import Rollout
from storage.errors import StorageError
from storage.store import Store
from storage.types import Reservation

LEASE_MS: Final = 60_000  # reservations of a process that died count for this long
_RENEWAL_INTERVAL_S: Final = 20.0


class StepReservations:
    """The reservations of calls of this process. `start` runs background tasks."""

    def __init__(self, store: Store, start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]) -> None:
        self._store = store
        self._start = start
        self._unused: set[str] = set()

    def __repr__(self) -> str:
        return f"<StepReservations {len(self._unused)} unused>"

    @asynccontextmanager
    async def kept(self, rollout: Rollout, step_id: str) -> AsyncIterator[None]:
        """Renew the reservation of a step, if it has one, inside the context. Entering it does not await."""
        if not rollout.has_reservation:
            yield
            return
        self._unused.add(step_id)
        renewing = self._start(self._renew(rollout, step_id))
        try:
            yield
        finally:
            renewing.cancel()
            if step_id in self._unused:
                self._unused.remove(step_id)
                self._start(self._lease(rollout, step_id, 0))

    def use(self, step_id: str) -> None:
        """Mark the reservation as used: the call is sent, and its step takes it over."""
        self._unused.discard(step_id)

    async def _renew(self, rollout: Rollout, step_id: str) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_INTERVAL_S)
            await self._lease(rollout, step_id, LEASE_MS)

    async def _lease(self, rollout: Rollout, step_id: str, lease_ms: int) -> None:
        with suppress(StorageError):  # the lease expires
            await self._store.reservations.extend(
                rollout.rollout_id, rollout.incarnation, Reservation(step_id, lease_ms)
            )
