"""A queue that limits the concurrent calls of one endpoint and is fair between rollouts.

A released slot goes to the rollout that has waited longest, and to its first call. A rollout with a thousand concurrent
calls therefore waits for its own calls, and other rollouts do not.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from proxy.errors import EngineBusy


@dataclass(slots=True, eq=False)
class _Waiter:
    """A queued call. `granted` is True if it got a slot, False if it should fail over."""

    rollout_id: str
    can_fail_over: bool
    granted: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """The slots and the queue of one endpoint. `limit` may change; None is unlimited."""

    def __init__(self, limit: int | None, *, max_waiting: int, timeout_s: float) -> None:
        self.limit = limit
        self.in_flight = 0
        self.waiting = 0
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[str, deque[_Waiter]] = {}  # by rollout, in the order in which slots are granted

    def __repr__(self) -> str:
        return f"<FairQueue: {self.in_flight} in flight, {self.waiting} waiting>"

    @property
    def is_free(self) -> bool:
        """Whether a new call gets a slot without waiting."""
        return self.limit is None or (self.in_flight < self.limit and not self._lanes)

    async def acquire(self, rollout_id: str, *, can_fail_over: bool) -> bool:
        """Wait for a slot, which `release` returns. False if the call was evicted and should fail over.

        Raises:
            EngineBusy: The queue is full, or waiting timed out.
        """
        if self.is_free:
            self.in_flight += 1
            return True
        if self.waiting >= self._max_waiting:
            raise EngineBusy(
                f"{self.in_flight} calls are in flight at the engine, and {self.waiting} are "
                "queued (engines.max_queued). Try again later."
            )
        waiter = self._enqueue(rollout_id, can_fail_over=can_fail_over)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(waiter.granted)
        except TimeoutError:
            self._cancel(waiter)
            raise EngineBusy(
                f"Timed out after {self._timeout_s:g} s in the queue of the engine "
                "(engines.queue_timeout_s). Try again later."
            ) from None
        except asyncio.CancelledError:
            self._cancel(waiter)
            raise

    def release(self) -> None:
        """Return a slot, and grant it to the next waiter."""
        self.in_flight -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Grant the free slots to waiters."""
        while self._lanes and (self.limit is None or self.in_flight < self.limit):
            rollout_id, lane = next(iter(self._lanes.items()))
            waiter = lane[0]
            self._remove(waiter)
            if lane:  # to the end of the round
                self._lanes[rollout_id] = self._lanes.pop(rollout_id)
            self.in_flight += 1
            waiter.granted.set_result(True)

    def evict_waiters(self) -> None:
        """Evict the waiters that can fail over."""
        for waiter in [waiter for lane in self._lanes.values() for waiter in lane if waiter.can_fail_over]:
            self._remove(waiter)
            waiter.granted.set_result(False)

    def _enqueue(self, rollout_id: str, *, can_fail_over: bool) -> _Waiter:
        waiter = _Waiter(rollout_id, can_fail_over)
        self._lanes.setdefault(rollout_id, deque()).append(waiter)
        self.waiting += 1
        return waiter

    def _cancel(self, waiter: _Waiter) -> None:
        """Remove a waiter; a slot that was granted at the same moment goes to the next one."""
        if not waiter.granted.done():
            self._remove(waiter)
            waiter.granted.cancel()
        elif waiter.granted.result():
            self.release()

    def _remove(self, waiter: _Waiter) -> None:
        lane = self._lanes[waiter.rollout_id]
        lane.remove(waiter)
        self.waiting -= 1
        if not lane:
            del self._lanes[waiter.rollout_id]
