"""Drift, explained: the boundaries of a rollout's tree with the texts around them, and their totals.

Holds the look-up of texts (by the configured tokenizer, else by the engine that sampled), and the count of drift once a
rollout is finished. What a boundary is, and of which kind, is decided in `proxy.trajectory.drift`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import orjson

from proxy.engines.detokenizing import ask_text, read_text
from proxy.errors import EngineFault, NotValid
from proxy.logs import LOG
from proxy.parts import Parts
from proxy.rollouts import DRIFT_MARK
from proxy.trajectory.drift import Boundary, Drift, explain, find_boundaries
from proxy.trajectory.step import Step
from proxy.trajectory.tree import grow
from proxy.upstream import Endpoint
from storage.store import RolloutGone, StorageError

_MOST_LOOKED_UP: Final = 100  # boundaries of a rollout whose texts are looked up
_AT_ONCE: Final = 8
_TEXTS_WITHIN_S: Final = 5.0

Decode = Callable[[Sequence[int]], str]


async def find_drift(parts: Parts, steps: Sequence[Step], *, texts: bool = True) -> list[Drift]:
    """Every boundary of a rollout, explained, the oldest first. Needs steps that were read whole.

    Each says whether it has its texts, or why not. Without `texts` none are looked up: the ids and the messages explain what
    they can.
    """
    boundaries = await asyncio.to_thread(lambda: find_boundaries(grow(steps)))
    if not texts:
        return [explain(boundary, missing="not_requested") for boundary in boundaries]
    turn = asyncio.Semaphore(_AT_ONCE)
    deadline = asyncio.get_running_loop().time() + _TEXTS_WITHIN_S

    async def explained(boundary: Boundary) -> Drift:
        engine = boundary.earlier.step.engine.name
        try:
            async with asyncio.timeout_at(deadline), turn:
                expected = await _text(parts, engine, boundary.expected_ids)
                found = None if expected is None else await _text(parts, engine, boundary.found_ids)
        except TimeoutError:
            return explain(boundary, missing="timeout")
        return explain(boundary, expected, found)

    looked_up = await asyncio.gather(*map(explained, boundaries[:_MOST_LOOKED_UP]))
    return [*looked_up, *(explain(boundary, missing="over_limit") for boundary in boundaries[_MOST_LOOKED_UP:])]


async def count_drift(parts: Parts, rollout_id: str, birth: str, steps: Sequence[Step]) -> None:
    """Count a finished rollout's drift by kind: on the rollout, and in the metrics."""
    kinds = Counter(drift.kind for drift in await find_drift(parts, steps))
    if kinds["unexplained"]:
        LOG.warning(
            "%d of %d places of drift are counted as unexplained: their texts were not looked up within %g s, or there are "
            "more than %d", kinds["unexplained"], kinds.total(), _TEXTS_WITHIN_S, _MOST_LOOKED_UP,
            extra={"fields": {"rollout_id": rollout_id}},
        )  # fmt: skip
    try:
        marks = {DRIFT_MARK: orjson.dumps(kinds)}
        await parts.store.mark(rollout_id, birth, marks, now_ms=parts.clock.now_ms())
    except RolloutGone:
        return  # deleted meanwhile
    except StorageError as error:
        LOG.error("drift is not counted: %s", error, extra={"fields": {"rollout_id": rollout_id}})
        return
    for kind, count in kinds.items():
        parts.metrics.drift.labels(kind).inc(count)


async def _text(parts: Parts, engine: str, ids: Sequence[int]) -> str | None:
    """The text of ids: by the tokenizer of that endpoint, else by the engine itself."""
    try:
        tokenizer = await parts.tokenizers.of(engine)
    except NotValid as error:
        LOG.warning("%s", error)
        tokenizer = None
    if tokenizer is not None:
        return await asyncio.to_thread(tokenizer.decode, ids)
    endpoint = next((one for one in parts.upstream.endpoints if one.settings.label == engine), None)
    return None if endpoint is None else await ask_engine(parts, endpoint, ids)


async def ask_engine(parts: Parts, endpoint: Endpoint, ids: Sequence[int]) -> str | None:
    """The text of ids, by the engine; None if it tells none."""
    lookup = ask_text(endpoint.kind, ids)
    if lookup is None:
        return None
    headers, body = (("Content-Type", "application/json"),), orjson.dumps(lookup.body)
    try:
        async with parts.upstream.send(endpoint, "POST", lookup.path, headers=headers, body=body) as answer:
            text = b"".join([read async for read in answer.reads()])
        return read_text(endpoint.kind, orjson.loads(text)) if answer.status == 200 else None
    except (EngineFault, orjson.JSONDecodeError):
        return None
