"""Renewal of rollouts with calls in flight, where rollouts expire (`store.ttl_s`).

Rule 1: while a call is in flight, its rollout and its group do not expire, however long the call takes.
Rule 2: the cost is per rollout, not per call; without a TTL, nothing is kept and nothing is renewed.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError
from storage.store import Store
from storage.types import Origin

_RENEWALS_PER_TTL: Final = 3
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

    @contextmanager
    def kept(self, rollout_id: str, incarnation: str, group_id: str | None, origin: Origin) -> Iterator[None]:
        """Renew a rollout and its group inside the context. `origin` is how it was stored when the call opened it."""
        if self._ttl_s is None:
            yield
            return
        name = (rollout_id, incarnation)
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
        for start in range(0, len(entities), _CONCURRENCY):
            chunk = entities[start : start + _CONCURRENCY]
            await asyncio.gather(*(store.renew(name, incarnation) for store, name, incarnation in chunk))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("TTL of rollouts not renewed: %s", error)
