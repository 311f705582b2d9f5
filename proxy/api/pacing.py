"""The order in which calls start that arrive at the same time."""

import asyncio
from collections import deque
from typing import Final

_CALLS_PER_ITERATION: Final = 16


class StartPacing:
    """Starts at most `limit` calls in each iteration of the event loop, in the order of their arrival.

    The event loop advances all tasks that are ready by one step per iteration. Without a limit, the first of thousands of
    calls would reach its engine only after the last one was planned, and no other request would be answered meanwhile.
    """

    def __init__(self, limit: int = _CALLS_PER_ITERATION) -> None:
        self._limit = limit
        self._left = limit  # in this iteration; if less than `limit`, `_next_iteration` is scheduled
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<StartPacing, {len(self._waiting)} waiting>"

    async def turn(self) -> None:
        """Return when a call may start."""
        loop = asyncio.get_running_loop()
        if self._left:
            if self._left == self._limit:
                loop.call_soon(self._next_iteration)
            self._left -= 1
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_iteration(self) -> None:
        self._left = self._limit
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a cancelled call takes no turn
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._limit:
            asyncio.get_running_loop().call_soon(self._next_iteration)
