"""Deadlines of rollouts: a rollout that is older than `deadline_s`, had no call in flight for `idle_s` since its first one, or
had no call for `start_s`, is finished.

Rule 1: the rollout in the store decides: its age, and `touched_ms`, which each call sets when it begins and when its step is
        stored. Timers in the store are only the times at which some process looks at a rollout.
Rule 2: every process looks at rollouts whose timers have expired. A claimed timer is removed after the rollout is finished and
        its group is complete; if the process dies before, the timer expires again, and another process completes the work.
Rule 3: a process touches the rollouts with `idle_s` that have calls in flight. A quiet rollout is finished only if it was not
        touched since it was read. So of a call and a finish at the same moment the store has one first: either the rollout
        stays open, or the call is rejected (docs/decisions/067).
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from proxy.clock import Clock
from proxy.errors import Conflict, Damaged, NotFound
from proxy.rollouts.finishing import Finisher
from proxy.rollouts.rollout import DEADLINE, MIN_IDLE_S, Rollout, is_past_deadline, read_rollout
from proxy.rollouts.stored_fields import left_out
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError
from storage.store import Store
from storage.types import Timer

_INTERVALS_S: Final = (0.75, 1.0)  # between sweeps, drawn so that processes take turns
_AFTER_FAILURE_S: Final = 5.0  # processes with calls in flight touch their rollouts first
_LEASE_MS: Final = 10_000  # of a claimed timer
_TIMERS_PER_CLAIM: Final = 8  # for each of the store's sixteen parts
_FINISHES_AT_ONCE: Final = 32
_TOUCHES_PER_IDLE: Final = 3
_TOUCHES_AT_ONCE: Final = 64
_TICK_S: Final = 0.25
_TOUCHED_PART: Final = 0.01  # of `idle_s`: a call that ends so soon after a touch is not touched again


class Deadlines:
    """Finish the rollouts of the store that are past their deadlines. Call `close` before the store is closed."""

    def __init__(self, store: Store, clock: Clock, finisher: Finisher, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._finisher = finisher
        self._metrics = metrics
        self._random = random.Random()  # noqa: S311 - no secret; of its own, so that it changes no state of other code
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the sweeps."""
        self._task = asyncio.get_running_loop().create_task(self._sweep_forever())

    async def close(self) -> None:
        """Stop the sweeps; another process completes what this one has claimed."""
        await _cancel(self._task)

    async def sweep(self) -> None:
        """Look at each rollout whose timer has expired. Raises StorageError."""
        while True:
            now_ms = self._clock.now_ms()
            until_ms = now_ms + _LEASE_MS
            timers = await self._store.timers.claim(_TIMERS_PER_CLAIM, now_ms=now_ms, until_ms=until_ms)
            if not timers:
                return
            for start in range(0, len(timers), _FINISHES_AT_ONCE):
                await self._look_at(timers[start : start + _FINISHES_AT_ONCE], until_ms)

    async def _look_at(self, timers: list[Timer], until_ms: int) -> None:
        """Finish those rollouts that are due, and set the timers of the others. Raises StorageError."""
        found = await asyncio.gather(*(self._next_ms(timer, until_ms) for timer in timers), return_exceptions=True)
        times: dict[Timer, int | None] = {}
        failure: StorageError | None = None
        for timer, next_ms in zip(timers, found, strict=True):
            if not isinstance(next_ms, BaseException):
                times[timer] = next_ms
            elif isinstance(next_ms, StorageError):
                failure = next_ms
            else:  # of this rollout only: it is looked at again when the claim of its timer ends
                LOG.error("Deadline not enforced", exc_info=next_ms, extra={"fields": {"rollout_id": timer.rollout}})
        await self._store.timers.move(times, from_ms=until_ms)
        if failure is not None:
            raise failure

    async def _next_ms(self, timer: Timer, until_ms: int) -> int | None:
        """Finish a rollout if it is due; return when to look at it again, None for never."""
        stored = await self._store.get(timer.rollout)
        if stored is None or stored.incarnation != timer.incarnation:
            return None
        try:
            rollout = read_rollout(stored)
        except Damaged as damage:
            left_out([damage], self._metrics)
            return until_ms
        if rollout.is_finished:  # the process that finished it may have died before it completed the group
            await self._finisher.after_finish(rollout, again=True)
            return None
        due, now_ms = rollout.due_ms, self._clock.now_ms()
        if due is None or due > now_ms:
            return rollout.next_look_ms(now_ms)
        seen_ms = None if is_past_deadline(rollout, now_ms) else rollout.touched_ms
        try:
            rollout = await self._finisher.finish(rollout, "aborted", reason=DEADLINE, touched_ms=seen_ms)
        except Conflict:
            return until_ms  # finished otherwise at this moment; look whether its group is complete
        except NotFound:
            return None
        return None if rollout.is_finished else rollout.next_look_ms(now_ms)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(*_INTERVALS_S))
            try:
                await self.sweep()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("deadlines").inc()
                LOG.warning("Deadlines of rollouts not checked: %s", error)
                await asyncio.sleep(_AFTER_FAILURE_S)


@dataclass(slots=True)
class _Active:
    """One incarnation of a rollout with calls in flight. `touched_s` and `touch_s`: its last and its next touch on the loop."""

    calls: int
    every_s: float
    touched_s: float
    touch_s: float


class Activity:
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
        self._run = run
        self._active: dict[Timer, _Active] = {}
        self._has_active = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Activity of {len(self._active)} rollouts>"

    def start(self) -> Self:
        """Start the touches."""
        self._task = asyncio.get_running_loop().create_task(self._touch_forever())
        return self

    async def close(self) -> None:
        """Stop the touches."""
        await _cancel(self._task)

    def begin(self, rollout: Rollout) -> bool:
        """Touch a rollout with `quiet_s`, which its call has opened just now, until `end`; return whether it has one."""
        if rollout.quiet_s is None or rollout.is_finished:
            return False
        name = Timer(rollout.rollout_id, rollout.incarnation)
        quiet_s, now_s = max(rollout.quiet_s, MIN_IDLE_S), asyncio.get_running_loop().time()
        every_s = quiet_s / _TOUCHES_PER_IDLE
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
            quiet_s = max(rollout.quiet_s or 0, MIN_IDLE_S)
            if asyncio.get_running_loop().time() - active.touched_s > _TOUCHED_PART * quiet_s:
                self._run(self._touch_at_end(name))

    async def touch(self) -> None:
        """Touch each rollout whose time has come. Raises StorageError."""
        loop = asyncio.get_running_loop()
        due = [(name, active) for name, active in self._active.items() if active.touch_s <= loop.time()]
        failures: list[BaseException] = []
        for start in range(0, len(due), _TOUCHES_AT_ONCE):
            chunk = due[start : start + _TOUCHES_AT_ONCE]
            now_ms = self._clock.now_ms()
            touched = (self._store.renew(*name, now_ms=now_ms) for name, _ in chunk)
            for (_, active), found in zip(chunk, await asyncio.gather(*touched, return_exceptions=True), strict=True):
                if isinstance(found, BaseException):
                    failures.append(found)
                else:
                    active.touched_s = loop.time()
                    active.touch_s = active.touched_s + active.every_s
        if failures:  # of some of them; the others are touched
            raise failures[0]

    async def _touch_at_end(self, name: Timer) -> None:
        """Touch a rollout at the end of a call, which may have no step."""
        with suppress(StorageError):  # then it counts as idle since its last touch
            await self._store.renew(*name, now_ms=self._clock.now_ms())

    async def _touch_forever(self) -> None:
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


async def _cancel(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
