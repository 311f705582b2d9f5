"""The drift of rollouts: boundaries with the texts around them, and the totals per kind.

Texts come from the configured tokenizer, else from the engine that sampled. `proxy.trajectory.drift` defines boundaries and
their kinds.

Rule 1: texts that decide a kind are stored as marks of the rollout, by what they depend on (`Window.key`): the kind stays the
        same after the engine is gone.
Rule 2: a boundary without texts is `unexplained`; each later read tries again.
Rule 3: totals are updated with compare-and-set, so that only one of several processes counts them in the metrics. They are
        counted in the background at the finish, after late steps and on reads: each count reads all steps of a rollout.
Rule 4: texts are also looked up as steps are stored, while the engine that sampled them is reachable (`DriftWatch`). What
        exceeds its limits is left to the finish of the rollout, or to a later read.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from random import shuffle
from typing import Final, Literal, TypeAlias

import orjson

from proxy.clock import Clock
from proxy.errors import ProxyError
from proxy.rollouts.recorder import FINISHED_FIELD
from proxy.rollouts.rollout import DRIFT_FIELD, CountedDrift, LiveRollout, Rollout, read_rollout, value_or
from proxy.rollouts.steps import read_steps
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.drift import Boundary, Drift, Texts, Window, explain, find_boundaries
from proxy.trajectory.step import Step
from proxy.trajectory.tree import grow
from proxy.upstream.client import Upstream
from proxy.upstream.concurrency import BackgroundTasks
from proxy.upstream.tokenizers import Tokenizers, text_from_ids
from storage.errors import FieldsChanged, RolloutDeleted, StorageError
from storage.redis.store import Store
from storage.types import Appended

_TEXTS_TIMEOUT_S: Final = 5.0
_MAX_LOOKUPS: Final = 100  # boundaries per read of a rollout that need texts
_TEXTS_MARK: Final = "drift:"
_CONCURRENT_LOOKUPS: Final = 16
_MIN_PAUSE_S: Final = 1.0  # between counts of one rollout for reads
_PAUSE_FACTOR: Final = 5  # times the duration of the work: frequent reads use at most a sixth of a CPU
_MAX_WAITING: Final = 1000  # look-ups for stored steps
_CLOSE_TIMEOUT_S: Final = 1.0
_WARNING_INTERVAL_S: Final = 60.0  # for each engine
_MAX_REMEMBERED: Final = 10_000

TextScope = Literal["all", "deciding", "none"]
Pair: TypeAlias = tuple[str, str]


class Coalescer:
    """Run one piece of work at a time for each name, and merge requests that come meanwhile."""

    def __init__(self) -> None:
        self._running: dict[Hashable, bool] = {}  # whether another run was requested meanwhile
        self._paused_until: OrderedDict[Hashable, float] = OrderedDict()

    def is_recent(self, name: Hashable) -> bool:
        """Return whether the work of this name is running, or ended so recently that a read does not repeat it."""
        return name in self._running or asyncio.get_running_loop().time() < self._paused_until.get(name, 0)

    async def run(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work. If it is running, return at once: it runs once more afterwards, for all requests together."""
        if name in self._running:
            self._running[name] = True
            return
        self._running[name] = True
        loop = asyncio.get_running_loop()
        try:
            while self._running[name]:
                self._running[name] = False
                started = loop.time()
                await work()
                self._paused_until[name] = loop.time() + max(_MIN_PAUSE_S, _PAUSE_FACTOR * (loop.time() - started))
                self._paused_until.move_to_end(name)
                while len(self._paused_until) > _MAX_REMEMBERED:
                    self._paused_until.popitem(last=False)
        finally:
            del self._running[name]


class DriftReporter:
    """Find the drift of rollouts, with its texts, and count the drift of finished ones in the background."""

    def __init__(  # noqa: PLR0917 - the services that it uses
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        upstream: Upstream,
        tokenizers: Tokenizers,
        tasks: BackgroundTasks,
        stopping: asyncio.Event,
    ) -> None:
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self._upstream = upstream
        self._tokenizers = tokenizers
        self._tasks = tasks
        self._stopping = stopping
        self._coalescer = Coalescer()
        self._lookups = asyncio.Semaphore(_CONCURRENT_LOOKUPS)

    async def find(self, rollout: Rollout, steps: Sequence[Step], *, texts: TextScope = "all") -> list[Drift]:
        """Return every boundary of a rollout with its kind, oldest first. Requires steps that were read whole.

        Each has its texts, or the reason why it has none. `texts` limits the look-ups of texts that are not stored: all
        boundaries, only boundaries of a kind that depends on texts, or none.
        """
        boundaries = await asyncio.to_thread(lambda: find_boundaries(grow(steps)))
        keys = [boundary.window.key for boundary in boundaries]
        found: dict[str, Pair | Texts] = dict(await self._kept_texts(rollout.rollout_id, keys))
        missing = {key: boundary for key, boundary in zip(keys, boundaries, strict=True) if key not in found}
        # Several boundaries may share a window that decides the kind of some of them.
        unknown = {key for key, boundary in zip(keys, boundaries, strict=True) if boundary.known is None}
        deciding = {key: boundary for key, boundary in missing.items() if key in unknown}
        if texts != "none":
            wanted = deciding if texts == "deciding" else deciding | missing
            found |= await self._look_up_all(wanted)
            await self.keep_texts(rollout.rollout_id, rollout.incarnation, {key: found[key] for key in deciding})
        texts_of = [(boundary, found.get(key, "not_requested")) for key, boundary in zip(keys, boundaries, strict=True)]
        return [
            explain(boundary, *known) if isinstance(known, tuple) else explain(boundary, missing=known)
            for boundary, known in texts_of
        ]

    async def count(self, rollout: Rollout, drift: Sequence[Drift], steps: int) -> None:
        """Set the totals of a finished rollout unless the stored ones are more complete, and count new ones in the metrics.

        `steps` is the number of steps in which drift was searched. Raises StorageError.
        """
        found = CountedDrift(Counter(boundary.kind for boundary in drift), steps)
        while rollout.drift is None or found.knows_more_than(rollout.drift):
            expect = {name: rollout.origin.fields.get(name) for name in (DRIFT_FIELD, FINISHED_FIELD)}
            fields = {DRIFT_FIELD: orjson.dumps({"kinds": found.kinds, "steps": found.steps})}
            try:
                stored = await self.store.update_if(
                    rollout.rollout_id, fields, expect=expect, now_ms=self.clock.now_ms()
                )
            except FieldsChanged as changed:
                is_same = changed.rollout.incarnation == rollout.incarnation
                if not is_same or changed.rollout.fields.get(FINISHED_FIELD) != expect[FINISHED_FIELD]:
                    return  # deleted, and created again
                rollout = read_rollout(changed.rollout)  # changed by another process: decide again
                continue
            if stored is not None:
                for kind, count in found.known_since(rollout.drift).items():
                    self.metrics.drift_boundaries.labels(kind).inc(count)
            return

    async def look_up(self, window: Window, *, deadline: float | None = None, alone: bool = False) -> Pair | Texts:
        """Return the texts of a window, or why it has none.

        `deadline` is on the event loop's clock. `alone`: on a connection of its own.
        """
        text_of = partial(text_from_ids, self._upstream, self._tokenizers, window.engine, new_connection=alone)
        try:
            async with asyncio.timeout_at(_deadline() if deadline is None else deadline), self._lookups:
                expected = await text_of(window.expected_ids)
                found = None if expected is None else await text_of(window.found_ids)
        except TimeoutError:
            return "timeout"
        return "unavailable" if expected is None or found is None else (expected, found)

    async def keep_texts(self, rollout_id: str, incarnation: str, found: Mapping[str, Pair | Texts]) -> None:
        """Store the texts that were found, by the keys of their windows. Failures of the store are logged."""
        marks = {_TEXTS_MARK + key: orjson.dumps(pair) for key, pair in found.items() if isinstance(pair, tuple)}
        if not marks:
            return
        try:
            await self.store.mark(rollout_id, incarnation, marks, now_ms=self.clock.now_ms())
        except RolloutDeleted:
            return  # deleted meanwhile
        except StorageError as error:
            LOG.warning("Texts of drift not stored: %s", error, extra={"fields": {"rollout_id": rollout_id}})

    async def _kept_texts(self, rollout_id: str, keys: Sequence[str]) -> dict[str, Pair]:
        marks = await self.store.marks(rollout_id, [_TEXTS_MARK + key for key in keys]) if keys else {}
        found = {name.removeprefix(_TEXTS_MARK): value_or(None, value, Pair) for name, value in marks.items()}
        return {key: pair for key, pair in found.items() if pair is not None}  # damaged ones are looked up again

    async def _look_up_all(self, boundaries: Mapping[str, Boundary]) -> dict[str, Pair | Texts]:
        """Return the texts of boundaries, or why they have none, by key.

        Above the limit, boundaries are chosen at random, so that boundaries of an engine that is gone do not block the rest.
        """
        deadline = _deadline()
        keys = list(boundaries)
        if len(keys) > _MAX_LOOKUPS:
            shuffle(keys)
        first = [boundaries[key].window for key in keys[:_MAX_LOOKUPS]]
        found = await asyncio.gather(*(self.look_up(window, deadline=deadline) for window in first))
        return dict(zip_longest(keys, found, fillvalue="over_limit"))

    def settle(self, rollout_id: str) -> None:
        """Count the drift of a rollout that was finished, or that got a step afterwards."""
        self._tasks.start(self._coalescer.run(rollout_id, lambda: self._settle(rollout_id)))

    def complete(self, rollout: Rollout) -> None:
        """Complete the drift of a rollout that is read, if it is finished and some of its drift is unknown."""
        if rollout.is_finished and not rollout.is_drift_known and not self._coalescer.is_recent(rollout.rollout_id):
            self.settle(rollout.rollout_id)

    def settle_late(self, step: Step, _live: LiveRollout, _appended: Appended, _bytes: int) -> None:
        """Count the drift again after a step was stored in a finished rollout; shortly after a count the next read does."""
        if not self._coalescer.is_recent(step.rollout_id):
            self.settle(step.rollout_id)

    async def _settle(self, rollout_id: str) -> None:
        try:
            stored = await self.store.get(rollout_id)
            rollout = None if stored is None else read_rollout(stored)
            if rollout is None or not rollout.is_finished or rollout.is_drift_known:
                return
            steps = await read_steps(self.store, rollout, whole=True)
            # A process that stops does not wait for engines: a later read completes what is missing.
            drift = await self.find(rollout, steps, texts="none" if self._stopping.is_set() else "deciding")
            if rollout.drift is None:  # log once; there may be many reads
                _warn_of_unexplained(rollout_id, drift)
            await self.count(rollout, drift, len(steps))
        except (ProxyError, StorageError) as error:
            LOG.error("Drift not counted: %s", error, extra={"fields": {"rollout_id": rollout_id}})


def _warn_of_unexplained(rollout_id: str, drift: Sequence[Drift]) -> None:
    """Log how many kinds are still unknown, and why."""
    reasons = Counter(boundary.texts for boundary in drift if boundary.kind == "unexplained")
    if reasons:
        why = ", ".join(f"{count} {_REASONS[reason]}" for reason, count in sorted(reasons.items()))
        LOG.warning(
            "Kinds of %d of %d drift boundaries not known yet: %s",
            reasons.total(), len(drift), why, extra={"fields": {"rollout_id": rollout_id}},
        )  # fmt: skip


_REASONS: Final[Mapping[Texts, str]] = {
    "unavailable": "without texts from the engine or a tokenizer",
    "timeout": f"timed out after {_TEXTS_TIMEOUT_S:g} s",
    "over_limit": f"over the limit of {_MAX_LOOKUPS} per request",
    "not_requested": "not requested",
}


def _deadline() -> float:
    return asyncio.get_running_loop().time() + _TEXTS_TIMEOUT_S


class DriftWatch:
    """Look up texts for stored steps. Call `close` before the engines are closed."""

    def __init__(self, reporter: DriftReporter) -> None:
        self._reporter = reporter
        self._tasks = BackgroundTasks()
        self._kept: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._warned: dict[str, float] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<DriftWatch {len(self._tasks)} waiting>"

    def offer(self, step: Step, live: LiveRollout, _appended: Appended, _bytes: int) -> None:
        """Look up the texts of a stored step."""
        incarnation = live.rollout.incarnation
        window = live.endings.add(step)
        if window is None or self._is_closed or len(self._tasks) >= _MAX_WAITING:
            return
        name = (step.rollout_id, incarnation, window.key)
        if name not in self._kept:  # several steps may continue alike
            self._kept[name] = None
            if len(self._kept) > _MAX_REMEMBERED:
                self._kept.popitem(last=False)
            self._tasks.start(self._look_up(name, window))

    async def close(self) -> None:
        """Wait briefly for running look-ups, and cancel the rest."""
        self._is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._tasks.wait()
        self._tasks.cancel()
        await self._tasks.wait()

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
