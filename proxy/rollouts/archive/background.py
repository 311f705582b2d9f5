"""The archiver of a running process: of all processes with one store, the oldest one sweeps.

Which one it is, heartbeats in the store show. Two may sweep at the same time when the oldest one stalls: the claims of the
archiver keep every version in one file.
"""

import asyncio
from contextlib import suppress
from typing import Final

from proxy.clock import Clock
from proxy.rollouts.archive.archiver import Archiver
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError
from storage.store import Store

_BEAT_S: Final = 5.0
_LIFETIME_MS: Final = 20_000
_RETRY_S: Final = 60.0
_SUFFIX: Final = "::archive"  # of the name of its heartbeat; no policy has this name (see `pause`)


class BackgroundArchive:
    """Sweep at an interval while this process is the oldest one. Call `close` before the store is closed."""

    def __init__(
        self, archiver: Archiver, store: Store, clock: Clock, metrics: Metrics, *, process_id: str, interval_s: float
    ) -> None:
        self._archiver = archiver
        self._store = store
        self._metrics = metrics
        self._name = process_id + _SUFFIX
        self._interval_s = interval_s
        self._oldest_ms: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        metrics.archive_oldest_age_seconds.set_function(
            lambda: 0.0 if self._oldest_ms is None else max(0.0, (clock.now_ms() - self._oldest_ms) / 1000)
        )

    def __repr__(self) -> str:
        return f"<BackgroundArchive every {self._interval_s:g} s>"

    def start(self) -> None:
        """Start the heartbeats and the sweeps."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._beat_forever()), loop.create_task(self._sweep_forever())]

    async def close(self) -> None:
        """Stop; another process completes what this one has claimed."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            with suppress(StorageError, TimeoutError):  # else it expires
                async with asyncio.timeout(1):
                    await self._store.announcements.heartbeat(self._name, b"", lifetime_ms=0)

    async def leads(self) -> bool:
        """Send a heartbeat; return whether this process is the oldest one. Raises StorageError."""
        _, beats = await self._store.announcements.heartbeat(self._name, b"", lifetime_ms=_LIFETIME_MS)
        return self._name == min(name for name in beats if name.endswith(_SUFFIX))

    async def _beat_forever(self) -> None:
        while True:
            with suppress(StorageError):  # calls notice it and report it
                await self.leads()
            await asyncio.sleep(_BEAT_S)

    async def _sweep_forever(self) -> None:
        while True:
            wait_s = self._interval_s
            try:
                if await self.leads():
                    self._oldest_ms = (await self._archiver.sweep()).oldest_ms
                else:
                    self._oldest_ms = None
            except (StorageError, OSError, ValueError) as error:
                self._metrics.archive_failures.inc()
                LOG.error("Rollouts not archived: %s", error)
                wait_s = min(wait_s, _RETRY_S)
            await asyncio.sleep(wait_s)
