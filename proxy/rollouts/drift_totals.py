"""Drift totals of finished rollouts, counted in the background at the finish, after late steps and on reads.

Each count reads all steps of a rollout; no request waits for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from proxy.errors import ProxyError
from proxy.rollouts.drift_report import DriftReporter, warn_of_unexplained
from proxy.rollouts.live import LiveRollout
from proxy.rollouts.rollout import Rollout, read_rollout
from proxy.rollouts.steps import read_steps
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Step
from proxy.upstream.concurrency import BackgroundTasks
from storage.errors import StorageError
from storage.types import Appended

_MIN_PAUSE_S: Final = 1.0
_PAUSE_FACTOR: Final = 5  # times the duration of the work: frequent reads use at most a sixth of a CPU
_MAX_REMEMBERED: Final = 10_000


class Coalescer:
    """Run one piece of work at a time for each name, and merge requests that come meanwhile."""

    def __init__(self) -> None:
        self._running: dict[Hashable, bool] = {}  # whether another run was requested meanwhile
        self._paused_until: OrderedDict[Hashable, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Coalescer {len(self._running)} running>"

    def is_recent(self, name: Hashable) -> bool:
        """Return whether the work of this name is running, or ended so recently that a read does not repeat it."""
        return name in self._running or asyncio.get_running_loop().time() < self._paused_until.get(name, 0)

    async def run(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work. If it is running, return at once: it runs once more afterwards, for all requests together."""
        if name in self._running:
            self._running[name] = True
            return
        self._running[name] = True
        try:
            while self._running[name]:
                self._running[name] = False
                await self._do(name, work)
        finally:
            del self._running[name]

    async def _do(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await work()
        ended = loop.time()
        self._paused_until[name] = ended + max(_MIN_PAUSE_S, _PAUSE_FACTOR * (ended - started))
        self._paused_until.move_to_end(name)
        while len(self._paused_until) > _MAX_REMEMBERED:
            self._paused_until.popitem(last=False)


class DriftTotals:
    """Count the drift of finished rollouts in the background."""

    def __init__(self, reporter: DriftReporter, tasks: BackgroundTasks, stopping: asyncio.Event) -> None:
        self.reporter = reporter
        self._tasks = tasks
        self._stopping = stopping
        self._coalescer = Coalescer()

    def settle(self, rollout_id: str) -> None:
        """Count the drift of a rollout that was finished, or that got a step afterwards."""
        self._tasks.start(self._coalescer.run(rollout_id, lambda: self._settle(rollout_id)))

    def complete(self, rollout: Rollout) -> None:
        """Complete the drift of a rollout that is read, if it is finished and some of its drift is unknown."""
        if rollout.is_finished and not rollout.is_drift_known and not self._coalescer.is_recent(rollout.rollout_id):
            self.settle(rollout.rollout_id)

    def settle_late(self, step: Step, _live: LiveRollout, _appended: Appended, _bytes: int) -> None:
        """Count the drift again after a step was stored in a finished rollout.

        While it is counted, and shortly after, that is left to the next read: each count reads all steps.
        """
        if not self._coalescer.is_recent(step.rollout_id):
            self.settle(step.rollout_id)

    async def _settle(self, rollout_id: str) -> None:
        try:
            stored = await self.reporter.store.get(rollout_id)
            rollout = None if stored is None else read_rollout(stored)
            if rollout is None or not rollout.is_finished or rollout.is_drift_known:
                return
            steps = await read_steps(self.reporter.store, rollout, whole=True)
            # A process that stops does not wait for engines: a later read completes what is missing.
            drift = await self.reporter.find(rollout, steps, texts="none" if self._stopping.is_set() else "deciding")
            if rollout.drift is None:  # log once; there may be many reads
                warn_of_unexplained(rollout_id, drift)
            await self.reporter.count(rollout, drift, len(steps))
        except (ProxyError, StorageError) as error:
            LOG.error("Drift not counted: %s", error, extra={"fields": {"rollout_id": rollout_id}})
