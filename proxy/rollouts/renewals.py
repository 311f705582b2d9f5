"""Renewals while a call is in flight: of its rollout's TTL (`store.ttl_s`), and of its step reservation.

Rule 1: while a call is in flight, its rollout and its group do not expire, however long the call takes. The cost is per
        rollout, not per call; without a TTL, nothing is renewed.
Rule 2: in a rollout with a limit of steps, a call leases a step reservation from its admission on, and releases it if it is
        never sent. A call that is sent has a step, which takes the reservation over in the store.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from typing import Any, Final, Self

from proxy.rollouts.rollout import Rollout
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError
from storage.store import Store
from storage.types import Origin, Reservation

_RENEWALS_PER_TTL: Final = 3
_NO_RENEWAL: Final = nullcontext[None]()
_CONCURRENCY: Final = 64  # renewals per write to the store: one or two milliseconds of the event loop


@dataclass(slots=True)
class _Kept:
    """One incarnation of a rollout with calls in flight."""

    calls: int
    group_id: str | None
    origin: Origin


class Lifetimes:
    """Renew the rollouts with calls in flight, three times per TTL. Call `close` at the end."""

    def __init__(self, store: Store, metrics: Metrics, *, every_s: float | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._ttl_s = store.ttl_s
        self._every_s = (self._ttl_s or 0) / _RENEWALS_PER_TTL if every_s is None else every_s
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Lifetimes {len(self._kept)} rollouts kept>"

    async def start(self) -> Self:
        """Start the renewals."""
        if self._ttl_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._renew_forever())
        return self

    async def close(self) -> None:
        """Stop the renewals."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def kept(
        self, rollout_id: str, incarnation: str, group_id: str | None, origin: Origin
    ) -> AbstractContextManager[None]:
        """Renew a rollout and its group inside the context. `origin` is how it was stored when the call opened it."""
        return _NO_RENEWAL if self._ttl_s is None else self._kept_inside((rollout_id, incarnation), group_id, origin)

    @contextmanager
    def _kept_inside(self, name: tuple[str, str], group_id: str | None, origin: Origin) -> Iterator[None]:
        kept = self._kept.setdefault(name, _Kept(0, group_id, origin))
        kept.calls += 1
        kept.origin = origin  # the latest: it may have been rewarded since the first call
        try:
            yield
        finally:
            kept.calls -= 1
            if not kept.calls:
                del self._kept[name]

    def origin(self, rollout_id: str, incarnation: str) -> Origin | None:
        """Return what restores a rollout with calls in flight if it has expired."""
        kept = self._kept.get((rollout_id, incarnation))
        return None if kept is None else kept.origin

    async def renew(self) -> None:
        """Renew each rollout with calls in flight, and its group, once. Raises StorageError."""
        groups = {kept.group_id for kept in self._kept.values() if kept.group_id is not None}
        entities: list[tuple[Store, str, str | None]] = [(self._store, *name) for name in self._kept]
        entities += [(self._store.groups, group, None) for group in groups]
        failures: list[BaseException] = []
        for start in range(0, len(entities), _CONCURRENCY):
            chunk = entities[start : start + _CONCURRENCY]
            renewed = (store.renew(name, incarnation) for store, name, incarnation in chunk)
            found = await asyncio.gather(*renewed, return_exceptions=True)
            failures += [failure for failure in found if isinstance(failure, BaseException)]
        if failures:  # of some of them; the others are renewed
            raise failures[0]

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("TTL of rollouts not renewed: %s", error)


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

    def kept(self, rollout: Rollout, step_id: str) -> AbstractAsyncContextManager[None]:
        """Renew the reservation of a step, if it has one, inside the context. Entering it does not await."""
        return self._kept_inside(rollout, step_id) if rollout.has_reservation else _NO_RENEWAL

    @asynccontextmanager
    async def _kept_inside(self, rollout: Rollout, step_id: str) -> AsyncIterator[None]:
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
