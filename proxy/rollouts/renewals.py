"""Renewals of rollouts with calls in flight: of their TTL, and of the time at which they count as idle.

While a call is in flight, its rollout and its group do not expire (`store.ttl_s`), and its rollout is not idle (`idle_s`),
however long the call takes. The cost is per rollout, not per call; without a TTL and `idle_s`, nothing is renewed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from proxy.clock import Clock
from proxy.rollouts.rollout import LiveRollouts, Rollout
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import BackgroundWork
from storage.errors import StorageError
from storage.redis.store import Store
from storage.types import Timer

T = TypeVar("T")

_RENEWALS: Final = 3  # per TTL, and per `idle_s`
_CONCURRENCY: Final = 64  # renewals per write to the store: one or two milliseconds of the event loop
_TICK_S: Final = 0.25
_TOUCHED_PART: Final = 0.01  # of `idle_s`: a call that ends so soon after a touch is not touched again


async def _renew_all(entities: Sequence[T], renew: Callable[[T], Awaitable[object]]) -> None:
    """Renew entities. Raises the first failure once the others are renewed."""
    failures: list[BaseException] = []
    for start in range(0, len(entities), _CONCURRENCY):
        chunk = entities[start : start + _CONCURRENCY]
        found = await asyncio.gather(*map(renew, chunk), return_exceptions=True)
        failures += [failure for failure in found if isinstance(failure, BaseException)]
    if failures:
        raise failures[0]


class Lifetimes(BackgroundWork):
    """Renew the rollouts with calls in flight, three times per TTL. Call `close` at the end."""

    def __init__(self, store: Store, metrics: Metrics, rollouts: LiveRollouts, *, every_s: float | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._rollouts = rollouts
        self._every_s = (store.ttl_s or 0) / _RENEWALS if every_s is None else every_s

    def start(self) -> Self:
        """Start the renewals, if the store has a TTL."""
        return self if self._store.ttl_s is None else super().start()

    async def renew(self) -> None:
        """Renew each rollout with calls in flight, and its group, once. Raises StorageError."""
        rollouts = [live.rollout for live in self._rollouts.busy]
        names = {(rollout.rollout_id, rollout.incarnation) for rollout in rollouts}
        groups = {rollout.group_id for rollout in rollouts if rollout.group_id is not None}
        entities: list[tuple[Store, str, str | None]] = [(self._store, *name) for name in names]
        entities += [(self._store.groups, group, None) for group in groups]
        await _renew_all(entities, lambda entity: entity[0].renew(*entity[1:]))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("TTL of rollouts not renewed: %s", error)


@dataclass(slots=True)
class _Active:
    """One incarnation of a rollout with calls in flight. `touched_s` and `touch_s`: its last and its next touch on the loop."""

    calls: int
    every_s: float
    touched_s: float
    touch_s: float


class Activity(BackgroundWork):
    """Touch the rollouts with `idle_s` that have calls in flight, three times per `idle_s`. Call `close` at the end.

    `run` starts background tasks.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        run: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._start = run
        self._active: dict[Timer, _Active] = {}
        self._has_active = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Activity of {len(self._active)} rollouts>"

    def begin(self, rollout: Rollout) -> bool:
        """Touch a rollout with `quiet_s`, which its call has opened just now, until `end`; return whether it has one."""
        if rollout.quiet_s is None or rollout.is_finished:
            return False
        name = Timer(rollout.rollout_id, rollout.incarnation)
        every_s, now_s = rollout.quiet_s / _RENEWALS, asyncio.get_running_loop().time()
        active = self._active.setdefault(name, _Active(0, every_s, now_s, now_s + every_s))
        active.calls += 1
        self._has_active.set()
        return True

    def end(self, rollout: Rollout) -> None:
        """Touch the rollout of a call that ends once more, and not again without other calls."""
        name = Timer(rollout.rollout_id, rollout.incarnation)
        active = self._active[name]
        active.calls -= 1
        if not active.calls:
            del self._active[name]
            if asyncio.get_running_loop().time() - active.touched_s > _TOUCHED_PART * (rollout.quiet_s or 0):
                self._start(self._touch_at_end(name))

    async def touch(self) -> None:
        """Touch each rollout that is due. Raises StorageError."""
        loop = asyncio.get_running_loop()

        async def renew(name: Timer) -> None:
            await self._store.renew(*name, now_ms=self._clock.now_ms())
            if (active := self._active.get(name)) is not None:
                active.touched_s = loop.time()
                active.touch_s = active.touched_s + active.every_s

        await _renew_all([name for name, active in self._active.items() if active.touch_s <= loop.time()], renew)

    async def _touch_at_end(self, name: Timer) -> None:
        """Touch a rollout at the end of a call, which may have no step."""
        with suppress(StorageError):  # then it counts as idle since its last touch
            await self._store.renew(*name, now_ms=self._clock.now_ms())

    async def _run(self) -> None:
        while True:
            if not self._active:
                self._has_active.clear()
                await self._has_active.wait()
            await asyncio.sleep(_TICK_S)
            try:
                await self.touch()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("Rollouts with calls in flight not touched: %s", error)
