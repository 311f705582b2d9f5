"""Renewals of the TTL (`store.ttl_s`) of rollouts with calls in flight.

While a call is in flight, its rollout and its group do not expire, however long the call takes. The cost is per rollout, not
per call; without a TTL, nothing is renewed.
"""

import asyncio
from contextlib import suppress
from typing import Final, Self

from proxy.rollouts.live import LiveRollouts
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError
from storage.store import Store

_RENEWALS_PER_TTL: Final = 3
_CONCURRENCY: Final = 64  # renewals per write to the store: one or two milliseconds of the event loop


class Lifetimes:
    """Renew the rollouts with calls in flight, three times per TTL. Call `close` at the end."""

    def __init__(self, store: Store, metrics: Metrics, rollouts: LiveRollouts, *, every_s: float | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._rollouts = rollouts
        self._ttl_s = store.ttl_s
        self._every_s = (self._ttl_s or 0) / _RENEWALS_PER_TTL if every_s is None else every_s
        self._task: asyncio.Task[None] | None = None

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

    async def renew(self) -> None:
        """Renew each rollout with calls in flight, and its group, once. Raises StorageError."""
        rollouts = [live.rollout for live in self._rollouts.busy]
        names = {(rollout.rollout_id, rollout.incarnation) for rollout in rollouts}
        groups = {rollout.group_id for rollout in rollouts if rollout.group_id is not None}
        entities: list[tuple[Store, str, str | None]] = [(self._store, *name) for name in names]
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
