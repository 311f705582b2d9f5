"""The health of the store: reachable, or unreachable since a command failed.

The store counts as unreachable after a failed command, and as reachable after a successful write: a store that is full or
read-only still replies to PING.
"""

import asyncio
from collections.abc import Awaitable, Callable

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError, StoreUnreachable
from storage.store import Store

_INTERVALS_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between probes; the last one repeats
_PROBE_TIMEOUT_S = 2.0
PROBE = "probe"  # a constant of the store: only the first write of it changes the store


class StoreHealth:
    """Whether the store is reachable. `back` is awaited after each recovery; it may fail, which continues the probes."""

    def __init__(self, store: Store, metrics: Metrics, back: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._metrics = metrics
        self._back = back
        self._probing: asyncio.Task[None] | None = None
        self.unreachable: str | None = None  # the reason, or None while the store is reachable

    def __repr__(self) -> str:
        return f"<StoreHealth {self.unreachable or 'reachable'}>"

    def check(self) -> None:
        """Raise StoreUnreachable while the store is known to be unreachable."""
        if self.unreachable is not None:
            raise StoreUnreachable(self.unreachable)

    def failed(self, error: StorageError) -> None:
        """Handle a failed command: if the store is unreachable, start probing it."""
        if isinstance(error, StoreUnreachable) and self.unreachable is None:
            LOG.error("Store unreachable: %s", error)
            self.unreachable = str(error)
            self._metrics.store_up.set(0)
            self.probe()

    def probe(self) -> None:
        """Probe the store until it is reachable and `back` has succeeded."""
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe_until_reachable())

    async def close(self) -> None:
        """Stop the probes."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])

    async def _probe_until_reachable(self) -> None:
        probes = 0
        while True:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await self._store.ping()
                    await self._store.set_once(PROBE, b"1")
                if self.unreachable is not None:
                    LOG.info("Store reachable again")
                self.unreachable = None
                self._metrics.store_up.set(1)
                await self._back()
            except (StorageError, OSError) as error:
                self.unreachable = str(error) or f"the store timed out after {_PROBE_TIMEOUT_S:g} s"
                self._metrics.store_up.set(0)
            else:
                self._probing = None
                return
            await asyncio.sleep(_INTERVALS_S[min(probes, len(_INTERVALS_S) - 1)])
            probes += 1
