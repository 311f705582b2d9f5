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

_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between two looks; the last one again and again
_LOOK_S = 2.0
PROBE = "probe"  # a constant of the store: what writes it, writes nothing new after the first time


class StoreHealth:
    """Whether the store is away. `back` is awaited when it has come back, and may find it away again."""

    def __init__(self, store: Store, metrics: Metrics, back: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._metrics = metrics
        self._back = back
        self._looking: asyncio.Task[None] | None = None
        self.away: str | None = None  # why, while it is

    def __repr__(self) -> str:
        return f"<Standing {self.away or 'there'}>"

    def check(self) -> None:
        """Raise StoreUnreachable while the store is known to be away."""
        if self.away is not None:
            raise StoreUnreachable(self.away)

    def failed(self, error: StorageError) -> None:
        """A verb failed. If that means the store is away, it is looked for from now on."""
        if isinstance(error, StoreUnreachable) and self.away is None:
            LOG.error("the store is away: %s", error)
            self.away = str(error)
            self._metrics.store_up.set(0)
            self.look()

    def look(self) -> None:
        """Look for the store until it is there, and `back` has done its work."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def close(self) -> None:
        """Look for it no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look(self) -> None:
        looks = 0
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._store.ping()
                    await self._store.set_once(PROBE, b"1")
                if self.away is not None:
                    LOG.info("the store is back")
                self.away = None
                self._metrics.store_up.set(1)
                await self._back()
            except (StorageError, OSError) as error:
                self.away = str(error) or f"the store did not answer within {_LOOK_S:g} s"
                self._metrics.store_up.set(0)
            else:
                self._looking = None
                return
            await asyncio.sleep(_PAUSES_S[min(looks, len(_PAUSES_S) - 1)])
            looks += 1
