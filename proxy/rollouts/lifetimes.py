"""The lifetimes of rollouts that have calls in flight, where rollouts expire (`store.ttl_s`).

Holds which rollouts have calls in flight, the task that renews them in the store, and what an expired one is restored with. It
stores no step: the recorder does.

Rule 1: while a call is in flight, its rollout and its group do not expire, however long the call takes.
Rule 2: the cost is per rollout, not per call; where no ttl is set, nothing is kept and nothing is renewed.
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

_TIMES_A_LIFE: Final = 3
_AT_ONCE: Final = 64  # in one write to the store: a millisecond or two of the event loop


@dataclass(slots=True)
class _Kept:
    """One life of a rollout that has calls in flight."""

    calls: int
    group_id: str | None
    origin: Origin


class Lifetimes:
    """Renews the rollouts with calls in flight, three times in each ttl. `close` when done."""

    def __init__(self, store: Store, metrics: Metrics, *, every_s: float | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._ttl_s = store.ttl_s
        self._every_s = (self._ttl_s or 0) / _TIMES_A_LIFE if every_s is None else every_s
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Lifetimes {len(self._kept)} rollouts kept>"

    async def start(self) -> Self:
        """Renew from now on."""
        if self._ttl_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._renew_again_and_again())
        return self

    async def close(self) -> None:
        """Renew no more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    @contextmanager
    def kept(self, rollout_id: str, incarnation: str, group_id: str | None, origin: Origin) -> Iterator[None]:
        """Keep a rollout, and its group, while the context lasts. `origin` is how it was stored when the call opened it."""
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
        """What a rollout with calls in flight is restored with, should it have expired."""
        kept = self._kept.get((rollout_id, incarnation))
        return None if kept is None else kept.origin

    async def renew(self) -> None:
        """Renew each rollout that has calls in flight, and each of their groups, once. Raises StorageError."""
        groups = {kept.group_id for kept in self._kept.values() if kept.group_id is not None}
        lives: list[tuple[Store, str, str | None]] = [(self._store, *name) for name in self._kept]
        lives += [(self._store.groups, group, None) for group in groups]
        for start in range(0, len(lives), _AT_ONCE):
            now = lives[start : start + _AT_ONCE]
            await asyncio.gather(*(store.renew(name, incarnation) for store, name, incarnation in now))

    async def _renew_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("lifetimes of rollouts are not renewed: %s", error)
