"""Heartbeats that extend the lease of a batch while it is trained: a task, or a thread for the blocking client."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Final

MAX_JOIN_S: Final = 5.0  # an extension in flight may end later; nothing reads its result


class AsyncHeartbeat:
    """Calls `beat` every `interval_s` in a task, until it returns False or the heartbeat is stopped."""

    def __init__(self, beat: Callable[[], Awaitable[bool]], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run())  # noqa: TID251 - referenced here, cancelled in stop

    async def stop(self) -> None:
        """Cancel the task."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        is_held = True
        while is_held:
            await asyncio.sleep(self._interval_s)
            is_held = await self._beat()


class Heartbeat:
    """Calls `beat` every `interval_s` in a thread, until it returns False or the heartbeat is stopped."""

    def __init__(self, beat: Callable[[], bool], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokentape-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for a call of `beat` that is in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(MAX_JOIN_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            if not self._beat():
                return
