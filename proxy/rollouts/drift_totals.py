"""The totals of drift of finished rollouts: counted at the finish, and completed after a late step or on a look.

Holds when the drift of a rollout is looked through as a whole. Nobody waits for it: it reads all steps.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from proxy.errors import ProxyError
from proxy.rollouts.drift_report import DriftReporter, warn_of_unexplained
from proxy.rollouts.rollout import Rollout, read_rollout
from proxy.rollouts.steps import read_steps
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Step
from proxy.upstream.concurrency import BackgroundTasks
from storage.errors import StorageError
from storage.types import Appended

_LEAST_REST_S: Final = 1.0
_RESTS: Final = 5  # times as long as the work took: whoever asks all the time takes a sixth of a processor at most
_MOST_REMEMBERED: Final = 10_000


class Coalescer:
    """Does work once at a time for each name."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, bool] = {}  # whether it was asked for again meanwhile
        self._rests_until: OrderedDict[Hashable, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Coalescer {len(self._under_way)} under way>"

    def rests(self, name: Hashable) -> bool:
        """Whether the work of this name is under way, or was done so lately that a look alone is no reason to repeat it."""
        return name in self._under_way or asyncio.get_running_loop().time() < self._rests_until.get(name, 0)

    async def run(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work. If it is under way, return at once: it is done once more after that, however often it is asked for."""
        if name in self._under_way:
            self._under_way[name] = True
            return
        self._under_way[name] = True
        try:
            while self._under_way[name]:
                self._under_way[name] = False
                await self._do(name, work)
        finally:
            del self._under_way[name]

    async def _do(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await work()
        ended = loop.time()
        self._rests_until[name] = ended + max(_LEAST_REST_S, _RESTS * (ended - started))
        self._rests_until.move_to_end(name)
        while len(self._rests_until) > _MOST_REMEMBERED:
            self._rests_until.popitem(last=False)


class DriftTotals:
    """Counts the drift of finished rollouts in the background."""

    def __init__(self, reporter: DriftReporter, tasks: BackgroundTasks, stopping: asyncio.Event) -> None:
        self.reporter = reporter
        self._tasks = tasks
        self._stopping = stopping
        self._coalescer = Coalescer()

    def settle(self, rollout_id: str) -> None:
        """Count the drift of a rollout that was finished, or that got another step since."""
        self._tasks.start(self._coalescer.run(rollout_id, lambda: self._settle(rollout_id)))

    def complete(self, rollout: Rollout) -> None:
        """Complete the drift of a rollout that somebody looks at, if it is finished and some of its drift is not known."""
        if rollout.is_finished and not rollout.is_drift_known and not self._coalescer.rests(rollout.rollout_id):
            self.settle(rollout.rollout_id)

    def settle_late(self, step: Step, appended: Appended) -> None:
        """Count the drift anew after a step was stored in a finished rollout.

        While it is counted, and soon after, that is left to the next look: each count reads all steps.
        """
        if appended.is_late and not self._coalescer.rests(step.rollout_id):
            self.settle(step.rollout_id)

    async def _settle(self, rollout_id: str) -> None:
        try:
            stored = await self.reporter.store.get(rollout_id)
            rollout = None if stored is None else read_rollout(stored)
            if rollout is None or not rollout.is_finished or rollout.is_drift_known:
                return
            steps = await read_steps(self.reporter.store, rollout, whole=True)
            # A process that stops does not wait for engines: a later look completes what is missing.
            drift = await self.reporter.find(rollout, steps, texts="none" if self._stopping.is_set() else "deciding")
            if rollout.drift is None:  # later looks may be many
                warn_of_unexplained(rollout_id, drift)
            await self.reporter.count(rollout, drift, len(steps))
        except (ProxyError, StorageError) as error:
            LOG.error("drift is not counted: %s", error, extra={"fields": {"rollout_id": rollout_id}})
