"""The places of calls: a rollout that takes so many steps takes no call that would be one more, those in flight counted.

Holds a call's place from its admission on: kept while the call lasts, let go if it is never made. A call that is made has
a step, and the store gives the place to that. It must not know what the limit is: the store gave the place or did not.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from proxy.rollouts.rollout import Rollout
from storage.errors import StorageError
from storage.store import Store
from storage.types import Reservation

LEASE_MS: Final = 60_000  # so long are the places of a process that died counted
_RENEW_S: Final = 20.0


class StepReservations:
    """The places that calls of this process hold. `hold` runs what nobody waits for."""

    def __init__(self, store: Store, hold: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]) -> None:
        self._store = store
        self._hold = hold
        self._unused: set[str] = set()

    def __repr__(self) -> str:
        return f"<Places {len(self._unused)} of calls not made yet>"

    @asynccontextmanager
    async def kept(self, rollout: Rollout, step_id: str) -> AsyncIterator[None]:
        """The place that was given for a step, if one was, until the context is left. Nothing is awaited on the way in."""
        if not rollout.has_reservation:
            yield
            return
        self._unused.add(step_id)
        renewing = self._hold(self._renew(rollout, step_id))
        try:
            yield
        finally:
            renewing.cancel()
            if step_id in self._unused:
                self._unused.remove(step_id)
                self._hold(self._lease(rollout, step_id, 0))

    def use(self, step_id: str) -> None:
        """The call is made: whatever becomes of it, its step will take the place."""
        self._unused.discard(step_id)

    async def _renew(self, rollout: Rollout, step_id: str) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            await self._lease(rollout, step_id, LEASE_MS)

    async def _lease(self, rollout: Rollout, step_id: str, lease_ms: int) -> None:
        with suppress(StorageError):  # it will come free by itself
            await self._store.reservations.extend(
                rollout.rollout_id, rollout.incarnation, Reservation(step_id, lease_ms)
            )
