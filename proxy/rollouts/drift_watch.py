"""Look-up of the texts of drift as steps are stored, while the engine that sampled them is reachable.

No call waits for it. Look-ups that exceed its limits are left to the finish of the rollout, or to a later read.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final

from proxy.rollouts.drift_report import DriftReporter
from proxy.rollouts.live import LiveRollout
from proxy.telemetry.logs import LOG
from proxy.trajectory.drift import Window
from proxy.trajectory.endings import Endings
from proxy.trajectory.step import Step
from storage.types import Appended

_MAX_WAITING: Final = 1000
_CLOSE_TIMEOUT_S: Final = 1.0
_WARNING_INTERVAL_S: Final = 60.0  # for each engine
_MAX_REMEMBERED: Final = 10_000


class DriftWatch:
    """Look up texts for stored steps. Call `close` before the engines are closed."""

    def __init__(self, reporter: DriftReporter) -> None:
        self._reporter = reporter
        self._endings = Endings()
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._warned: dict[str, float] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<DriftWatch {len(self._tasks)} waiting, {self._endings!r}>"

    def offer(self, step: Step, live: LiveRollout, _appended: Appended, _bytes: int) -> None:
        """Look up the texts of a stored step."""
        incarnation = live.rollout.incarnation
        window = self._endings.add((step.rollout_id, incarnation, step.policy), step)
        if window is None or self._is_closed or len(self._tasks) >= _MAX_WAITING:
            return
        name = (step.rollout_id, incarnation, window.key)
        if name not in self._kept:  # several steps may continue alike
            self._kept[name] = None
            if len(self._kept) > _MAX_REMEMBERED:
                self._kept.popitem(last=False)
            self._hold(self._look_up(name, window))

    async def close(self) -> None:
        """Wait briefly for running look-ups, and cancel the rest."""
        self._is_closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_up(self, name: tuple[str, str, str], window: Window) -> None:
        rollout_id, incarnation, key = name
        # On a separate connection: a pooled one may still receive the end of a stream.
        texts = await self._reporter.look_up(window, alone=True)
        if not isinstance(texts, tuple):
            self._kept.pop(name, None)
            self._warn(window.engine, rollout_id)
        await self._reporter.keep_texts(rollout_id, incarnation, {key: texts})

    def _warn(self, engine: str, rollout_id: str) -> None:
        now = self._reporter.clock.monotonic()
        if now - self._warned.get(engine, -_WARNING_INTERVAL_S) >= _WARNING_INTERVAL_S:
            self._warned[engine] = now
            LOG.warning(
                "Kind of drift not known yet: engine %s did not return the texts",
                engine, extra={"fields": {"rollout_id": rollout_id}},
            )  # fmt: skip
