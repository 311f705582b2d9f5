"""How the store stands: there, or known to be away.

Holds the one memory of a store that failed and the task that asks it until it is back. It writes no step and refuses no
call itself: the recorder and the model API ask it. Rule: being away is learnt from a verb that failed and never guessed,
and is over when the store has taken a write, since a store that is full or read-only still answers a PING.
"""

import asyncio
from collections.abc import Awaitable, Callable

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from storage.errors import StorageError, StoreUnreachable
from storage.store import Store

_INTERVALS_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between two probes; the last one again and again
_PROBE_TIMEOUT_S = 2.0
PROBE = "probe"  # a constant of the store: what writes it, writes nothing new after the first time


class StoreHealth:
    """Whether the store is away. `back` is awaited when it has come back, and may find it away again."""

    def __init__(self, store: Store, metrics: Metrics, back: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._metrics = metrics
        self._back = back
        self._probing: asyncio.Task[None] | None = None
        self.unreachable: str | None = None  # why, while it is

    def __repr__(self) -> str:
        return f"<Standing {self.unreachable or 'there'}>"

    def check(self) -> None:
        """Raise StoreUnreachable while the store is known to be away."""
        if self.unreachable is not None:
            raise StoreUnreachable(self.unreachable)

    def failed(self, error: StorageError) -> None:
        """A verb failed. If that means the store is away, it is looked for from now on."""
        if isinstance(error, StoreUnreachable) and self.unreachable is None:
            LOG.error("the store is away: %s", error)
            self.unreachable = str(error)
            self._metrics.store_up.set(0)
            self.probe()

    def probe(self) -> None:
        """Look for the store until it is there, and `back` has done its work."""
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe_until_reachable())

    async def close(self) -> None:
        """Look for it no more."""
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
                    LOG.info("the store is back")
                self.unreachable = None
                self._metrics.store_up.set(1)
                await self._back()
            except (StorageError, OSError) as error:
                self.unreachable = str(error) or f"the store did not answer within {_PROBE_TIMEOUT_S:g} s"
                self._metrics.store_up.set(0)
            else:
                self._probing = None
                return
            await asyncio.sleep(_INTERVALS_S[min(probes, len(_INTERVALS_S) - 1)])
            probes += 1
