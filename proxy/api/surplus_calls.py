"""Stops the calls of surplus rollouts: an over-sampled group is complete without them.

Any process may finish a rollout as surplus, so each process checks the rollouts of its own calls in flight.
"""

import asyncio
from collections.abc import Set as AbstractSet
from typing import Final

from proxy.api.memory_limit import CallInFlight
from proxy.rollouts.rollout import SURPLUS, read_rollouts
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import BackgroundWork
from storage.errors import StorageError
from storage.redis.store import Store

_INTERVAL_S: Final = 1.0
_READS_AT_ONCE: Final = 64


class SurplusCalls(BackgroundWork):
    """Stop the calls of surplus rollouts, about once a second."""

    def __init__(self, store: Store, calls: AbstractSet[CallInFlight], metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._calls = calls

    async def stop_surplus(self) -> None:
        """Stop the calls of rollouts that are surplus by now. Raises StorageError."""
        names = sorted({call.over_sampled for call in self._calls if call.over_sampled is not None})
        for start in range(0, len(names), _READS_AT_ONCE):
            chunk = names[start : start + _READS_AT_ONCE]
            found = await asyncio.gather(*(self._store.get(rollout_id) for rollout_id, _ in chunk))
            rollouts, _ = read_rollouts(found, self._metrics)
            surplus = {(rollout.rollout_id, rollout.incarnation) for rollout in rollouts if rollout.reason == SURPLUS}
            for call in [call for call in self._calls if call.over_sampled in surplus]:
                call.stop("its group is complete without it")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await self.stop_surplus()
            except StorageError as error:
                LOG.warning("Calls of surplus rollouts not stopped: %s", error)
