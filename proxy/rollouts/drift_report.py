"""Drift, explained: the boundaries of a rollout's tree with the texts around them, and their totals.

Holds the look-up of texts (by the configured tokenizer, else by the engine that sampled), their keeping in the store, and the
totals of a finished rollout. What a boundary is, and of which kind, is decided in `proxy.trajectory.drift`.

Rule 1: texts that decide a kind are kept as marks of the rollout once they are known, by what they depend on (`Window.key`):
        the kind is then the same for whoever looks, whatever becomes of the engine.
Rule 2: what could not be looked up is `unexplained`, and each later look tries again.
Rule 3: totals are compared and set, so that of several processes that complete them one counts in the metrics.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from random import shuffle
from typing import Final, Literal, TypeAlias

import orjson

from proxy.clock import Clock
from proxy.rollouts.recorder import FINISHED_FIELD
from proxy.rollouts.rollout import DRIFT_FIELD, CountedDrift, Rollout, read_rollout
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.drift import Boundary, Drift, Texts, Window, explain, find_boundaries
from proxy.trajectory.step import Step
from proxy.trajectory.tree import grow
from proxy.upstream import Upstream
from proxy.upstream.token_text import text_from_ids
from proxy.upstream.tokenizers import Tokenizers
from storage.errors import FieldsChanged, RolloutDeleted, StorageError
from storage.store import Store

_TEXTS_WITHIN_S: Final = 5.0
_MOST_LOOKED_UP: Final = 100  # boundaries of a rollout whose texts are looked up at one look
_TEXTS_MARK: Final = "drift:"
_CONCURRENT_LOOKUPS: Final = 16

TextScope = Literal["all", "deciding", "none"]
Pair: TypeAlias = tuple[str, str]


class DriftReporter:
    """Finds the drift of rollouts, with its texts, and counts it."""

    def __init__(
        self, store: Store, clock: Clock, metrics: Metrics, upstream: Upstream, tokenizers: Tokenizers
    ) -> None:
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self._upstream = upstream
        self._tokenizers = tokenizers
        self._lookups = asyncio.Semaphore(_CONCURRENT_LOOKUPS)

    async def find(self, rollout: Rollout, steps: Sequence[Step], *, texts: TextScope = "all") -> list[Drift]:
        """Return every boundary of a rollout, explained, the oldest first. Needs steps that were read whole.

        Each has its texts, or the reason why there are none. Those that are not kept are looked up as `texts` says: for all
        boundaries, for those whose kind depends on them, or for none.
        """
        boundaries = await asyncio.to_thread(lambda: find_boundaries(grow(steps)))
        keys = [boundary.window.key for boundary in boundaries]
        told: dict[str, Pair | Texts] = dict(await self._kept_texts(rollout.rollout_id, keys))
        missing = {key: boundary for key, boundary in zip(keys, boundaries, strict=True) if key not in told}
        # One window may be that of several boundaries, and decide the kind of some of them.
        unknown = {key for key, boundary in zip(keys, boundaries, strict=True) if boundary.known is None}
        deciding = {key: boundary for key, boundary in missing.items() if key in unknown}
        if texts != "none":
            wanted = deciding if texts == "deciding" else deciding | missing
            told |= await self._look_up_all(wanted)
            await self.keep_texts(rollout.rollout_id, rollout.incarnation, {key: told[key] for key in deciding})
        return [
            _explained(boundary, told.get(key, "not_requested")) for key, boundary in zip(keys, boundaries, strict=True)
        ]

    async def count(self, rollout: Rollout, drift: Sequence[Drift], steps: int) -> None:
        """Set the totals of a finished rollout, unless those that are there know more; and count in the metrics what is new.

        `steps` is how many steps the drift was found in. Raises StorageError.
        """
        found = CountedDrift(Counter(one.kind for one in drift), steps)
        while rollout.drift is None or found.knows_more_than(rollout.drift):
            expect = {name: rollout.origin.fields.get(name) for name in (DRIFT_FIELD, FINISHED_FIELD)}
            fields = {DRIFT_FIELD: orjson.dumps({"kinds": found.kinds, "steps": found.steps})}
            try:
                stored = await self.store.update_if(
                    rollout.rollout_id, fields, expect=expect, now_ms=self.clock.now_ms()
                )
            except FieldsChanged as changed:
                if (
                    changed.rollout.incarnation != rollout.incarnation
                    or changed.rollout.fields.get(FINISHED_FIELD) != expect[FINISHED_FIELD]
                ):
                    return  # deleted, and opened anew
                rollout = read_rollout(changed.rollout)  # somebody was quicker: look again
                continue
            if stored is not None:
                for kind, count in found.known_since(rollout.drift).items():
                    self.metrics.drift_boundaries.labels(kind).inc(count)
            return

    async def look_up(self, window: Window, *, deadline: float | None = None, alone: bool = False) -> Pair | Texts:
        """Return the texts of a window, or why there are none. Only so many are looked up at once.

        `deadline` is by the event loop's clock. `alone`: as in `Upstream.send`.
        """
        found = None
        try:
            async with asyncio.timeout_at(_deadline() if deadline is None else deadline), self._lookups:
                expected = await text_from_ids(
                    self._upstream, self._tokenizers, window.engine, window.expected_ids, alone=alone
                )
                if expected is not None:
                    found = await text_from_ids(
                        self._upstream, self._tokenizers, window.engine, window.found_ids, alone=alone
                    )
        except TimeoutError:
            return "timeout"
        return "unavailable" if expected is None or found is None else (expected, found)

    async def keep_texts(self, rollout_id: str, incarnation: str, told: Mapping[str, Pair | Texts]) -> None:
        """Keep those texts that are known, by the keys of their windows. If the store fails, that is logged."""
        marks = {_TEXTS_MARK + key: orjson.dumps(pair) for key, pair in told.items() if isinstance(pair, tuple)}
        if not marks:
            return
        try:
            await self.store.mark(rollout_id, incarnation, marks, now_ms=self.clock.now_ms())
        except RolloutDeleted:
            return  # deleted meanwhile
        except StorageError as error:
            LOG.warning("texts of drift are not kept: %s", error, extra={"fields": {"rollout_id": rollout_id}})

    async def _kept_texts(self, rollout_id: str, keys: Sequence[str]) -> dict[str, Pair]:
        marks = await self.store.marks(rollout_id, [_TEXTS_MARK + key for key in keys]) if keys else {}
        return {name.removeprefix(_TEXTS_MARK): tuple(orjson.loads(value)) for name, value in marks.items()}

    async def _look_up_all(self, boundaries: Mapping[str, Boundary]) -> dict[str, Pair | Texts]:
        """The texts of boundaries, or why there are none; each by its key.

        Of more than the limit others are chosen at each look: those of an engine that is gone must not keep the others waiting.
        """
        deadline = _deadline()
        keys = list(boundaries)
        if len(keys) > _MOST_LOOKED_UP:
            shuffle(keys)
        first = [boundaries[key].window for key in keys[:_MOST_LOOKED_UP]]
        found = await asyncio.gather(*(self.look_up(window, deadline=deadline) for window in first))
        return dict(zip_longest(keys, found, fillvalue="over_limit"))


def warn_of_unexplained(rollout_id: str, drift: Sequence[Drift]) -> None:
    """Log how many kinds are not known yet, and why."""
    reasons = Counter(one.texts for one in drift if one.kind == "unexplained")
    if reasons:
        why = ", ".join(f"{count} {_REASONS[reason]}" for reason, count in sorted(reasons.items()))
        LOG.warning(
            "the kinds of %d of %d places of drift are not known yet: %s; a later look completes them",
            reasons.total(), len(drift), why, extra={"fields": {"rollout_id": rollout_id}},
        )  # fmt: skip


_REASONS: Final[Mapping[Texts, str]] = {
    "unavailable": "because neither the engine nor a tokenizer gave the texts",
    "timeout": f"because the engine did not give the texts within {_TEXTS_WITHIN_S:g} s",
    "over_limit": f"beyond the first {_MOST_LOOKED_UP} of this look",
    "not_requested": "not asked for",
}


def _deadline() -> float:
    return asyncio.get_running_loop().time() + _TEXTS_WITHIN_S


def _explained(boundary: Boundary, told: Pair | Texts) -> Drift:
    return explain(boundary, *told) if isinstance(told, tuple) else explain(boundary, missing=told)
