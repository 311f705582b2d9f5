"""The look-up of texts as steps are stored: while the engine that sampled them is there.

Holds the endings of the steps stored last, and the look-ups that wait. Rule: no call waits for it, and what it cannot do in
time or in bounds it leaves to the finish of the rollout, or to a later look.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final

from proxy.rollouts.drift_report import DriftReporter
from proxy.telemetry.logs import LOG
from proxy.trajectory.drift import Window
from proxy.trajectory.endings import Endings
from proxy.trajectory.step import Step
from storage.types import Appended

_MOST_WAITING: Final = 1000
_CLOSES_WITHIN_S: Final = 1.0
_WARN_EVERY_S: Final = 60.0  # of each engine
_REMEMBERED: Final = 10_000


class DriftWatch:
    """Looks texts up for steps that were stored. `close` before the engines are closed."""

    def __init__(self, reporter: DriftReporter) -> None:
        self._reporter = reporter
        self._endings = Endings()
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._warned: dict[str, float] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<DriftWatch {len(self._tasks)} waiting, {self._endings!r}>"

    def offer(self, step: Step, incarnation: str, appended: Appended) -> None:
        """Take a step that was stored, once its call is over with it."""
        if step.is_chat and not self._is_closed:
            asyncio.get_running_loop().call_soon(self._take, step, incarnation)

    async def close(self) -> None:
        """Wait a moment for what is under way, and leave the rest."""
        self._is_closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSES_WITHIN_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, step: Step, incarnation: str) -> None:
        window = self._endings.take((step.rollout_id, incarnation), step)
        if window is None or self._is_closed or len(self._tasks) >= _MOST_WAITING:
            return
        name = (step.rollout_id, incarnation, window.key)
        if name not in self._kept:  # a step of several that go on alike
            self._kept[name] = None
            if len(self._kept) > _REMEMBERED:
                self._kept.popitem(last=False)
            self._hold(self._look_up(name, window))

    def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_up(self, name: tuple[str, str, str], window: Window) -> None:
        rollout_id, incarnation, key = name
        # On a connection of its own: another one may still have the end of a stream.
        told = await self._reporter.look_up(window, alone=True)
        if not isinstance(told, tuple):
            self._kept.pop(name, None)
            self._warn(window.engine, rollout_id)
        await self._reporter.keep_texts(rollout_id, incarnation, {key: told})

    def _warn(self, engine: str, rollout_id: str) -> None:
        now = self._reporter.clock.monotonic()
        if now - self._warned.get(engine, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[engine] = now
            LOG.warning(
                "the kind of drift is not known yet: the engine %s did not give the texts; a later look completes it",
                engine, extra={"fields": {"rollout_id": rollout_id}},
            )  # fmt: skip
