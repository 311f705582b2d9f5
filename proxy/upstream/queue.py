"""The turns of calls at one endpoint: so many at once, and the others wait, each rollout for its own turn.

Holds the count of calls in flight and the queue of those that wait. It must not know what a call is, nor send anything.

Fair between rollouts: whoever leaves gives their turn to the rollout that has waited longest for one, and of its calls to
the first. A rollout with a thousand calls at once so waits for its own, and not others for it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from proxy.errors import EngineBusy


@dataclass(slots=True, eq=False)
class _Waiting:
    """One call that waits: told True when it has its turn, False when it had better go elsewhere."""

    rollout_id: str
    may_leave: bool
    told: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """The calls of one endpoint. `limit` may change; None is none."""

    def __init__(self, limit: int | None, *, max_waiting: int, timeout_s: float) -> None:
        self.limit = limit
        self.in_flight = 0
        self.waiting = 0
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[str, deque[_Waiting]] = {}  # by rollout, in the order of their turns

    def __repr__(self) -> str:
        return f"<Turns: {self.in_flight} in flight, {self.waiting} waiting>"

    @property
    def is_free(self) -> bool:
        """Whether a call that comes now need not wait."""
        return self.limit is None or (self.in_flight < self.limit and not self._lanes)

    async def take(self, rollout_id: str, *, may_leave: bool) -> bool:
        """Wait for a turn, and give it back by `give_back`. False: there is none, and the call had better go elsewhere.

        Raises EngineBusy if too many wait, or it took too long.
        """
        if self.is_free:
            self.in_flight += 1
            return True
        if self.waiting >= self._max_waiting:
            raise EngineBusy(
                f"{self.in_flight} calls are in flight, and {self.waiting} wait already (engines.max_queued)"
            )
        waiting = self._enter(rollout_id, may_leave=may_leave)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(waiting.told)
        except TimeoutError:
            self._leave(waiting)
            raise EngineBusy(f"no turn within {self._timeout_s:g} s (engines.queue_timeout_s)") from None
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def give_back(self) -> None:
        """A call has ended: the next one has its turn."""
        self.in_flight -= 1
        self.go_on()

    def go_on(self) -> None:
        """Give out what turns there are."""
        while self._lanes and (self.limit is None or self.in_flight < self.limit):
            rollout_id, lane = next(iter(self._lanes.items()))
            waiting = lane[0]
            self._remove(waiting)
            if lane:  # to the end of the round
                self._lanes[rollout_id] = self._lanes.pop(rollout_id)
            self.in_flight += 1
            waiting.told.set_result(True)

    def turn_away(self) -> None:
        """Tell those that may go elsewhere to do so."""
        for waiting in [one for lane in self._lanes.values() for one in lane if one.may_leave]:
            self._remove(waiting)
            waiting.told.set_result(False)

    def _enter(self, rollout_id: str, *, may_leave: bool) -> _Waiting:
        waiting = _Waiting(rollout_id, may_leave)
        self._lanes.setdefault(rollout_id, deque()).append(waiting)
        self.waiting += 1
        return waiting

    def _leave(self, waiting: _Waiting) -> None:
        """It waits no more; a turn that it was given in the same moment goes to the next one."""
        if not waiting.told.done():
            self._remove(waiting)
            waiting.told.cancel()
        elif waiting.told.result():
            self.give_back()

    def _remove(self, waiting: _Waiting) -> None:
        lane = self._lanes[waiting.rollout_id]
        lane.remove(waiting)
        self.waiting -= 1
        if not lane:
            del self._lanes[waiting.rollout_id]
