"""The audit: scores recorded sequences again with an engine and classifies the differences.

It never writes to the store and never changes a row. A run over many rows has a log, from which it resumes after an
interruption. The server audits a share of the finished steps in the background.

Rule 1: the log has final results only: a sequence is not logged if the engine was unreachable or failed.
Rule 2: the log identifies a sequence by everything that its result depends on except the engine's weights: ids, logprobs,
        tolerance, model. Audit other weights with another log.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from proxy.clock import Clock
from proxy.errors import EngineError
from proxy.rollouts.scoring.requests import SCORING_KINDS, NotScored, Scorer, TooLong, find_scorer, sender
from proxy.rollouts.scoring.verdict import (
    OFFSETS,
    Assessment,
    AuditSample,
    LogprobsMode,
    Scored,
    judge,
    may_be_moved,
    moved_ids,
    name_of,
    of_choice,
    of_row,
    pairs_of,
)
from proxy.telemetry.logs import LOG
from proxy.trajectory.images import recorded as recorded_images
from proxy.trajectory.step import Step
from proxy.upstream.concurrency import BackgroundWork

if TYPE_CHECKING:  # of the server; `tokentape audit` starts without them
    from proxy.rollouts.rollout import LiveRollout
    from proxy.telemetry.metrics import Metrics
    from proxy.upstream.client import Upstream
    from proxy.upstream.endpoint import Endpoint
    from storage.types import Appended

TOO_LONG, NOT_SCORED, NOTHING = "too long", "not scored", "nothing to compare"
_CONTEXT_IDS = 5  # ids shown on each side of the first token beyond the tolerance
_IMAGES = "the prompt has images, without which its ids are another prompt"
_UNLOGGED = "no logprobs: no token is trained, or none were requested (record.logprobs: off)"
_BEYOND = "the only logprob is of the last token of a full context window, which cannot be scored as a prompt"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one sequence."""

    rollout_id: str
    branch: int
    verdict: str  # a `Verdict`, or the reason why there is none
    count: int = 0  # tokens that were compared
    informative: int = 0
    mean: float | None = None
    max: float | None = None
    offset: int = 0
    first: dict[str, Any] | None = None  # the first token beyond the tolerance, with the ids around it
    note: str = ""
    skipped: int = 0  # tokens with a recorded logprob that no engine can score again

    @property
    def is_aligned(self) -> bool:
        """Whether tokens were compared and no fault was found."""
        return self.verdict == "aligned"

    @property
    def is_well(self) -> bool:
        """Whether no fault was found."""
        return self.is_aligned or self.verdict == NOTHING


def of_finding(recorded: AuditSample, scored: Scored, finding: Assessment) -> Result:
    """Return the result of a sequence from its assessment."""
    first = None if finding.first is None else _around(recorded, scored, finding.first)
    return Result(recorded.name, recorded.branch, **{**asdict(finding), "first": first})


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the summary and all results, ready for JSON."""
    compared = [result for result in results if result.mean is not None]
    tokens = sum(result.count for result in compared)
    weighed = sum((result.mean or 0) * result.count for result in compared)
    return {
        "aligned": is_well(results),
        "verdicts": dict(Counter(result.verdict for result in results)),
        "tokens": tokens,
        "skipped": sum(result.skipped for result in results),
        "mean": weighed / tokens if tokens else None,
        "max": max((result.max or 0 for result in compared), default=None),
        "sequences": [asdict(result) for result in results],
    }


def is_well(results: Sequence[Result]) -> bool:
    """Return whether a sequence is aligned, and all others are aligned or have nothing to compare."""
    return any(result.is_aligned for result in results) and all(result.is_well for result in results)


def _around(recorded: AuditSample, scored: Scored, position: int) -> dict[str, Any]:
    span = recorded.span_at(position)
    ids = recorded.token_ids
    return {
        "position": position,
        "step_id": span.step_id if span else None,
        "before": list(ids[max(position - _CONTEXT_IDS, 0) : position]),
        "id": ids[position],
        "after": list(ids[position + 1 : position + 1 + _CONTEXT_IDS]),
        "recorded": recorded.logprobs[position],
        "scored": scored[position],
    }


_UNFINISHED = Result("", 0, NOT_SCORED)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of an audit."""

    # One vLLM 0.32 in float32 scores its own samples within 1e-4; bfloat16, other batch sizes and other kernels differ by more.
    # 0.01, one percent of a likelihood, is far below the effect of a wrong token, and may be too strict for them.
    tolerance: float = 0.01
    logprobs_mode: LogprobsMode = "raw_logprobs"
    at_once: int = 4  # sequences that the engine scores concurrently
    policy_version: str | None = None  # of the engine's weights, if it reports none


class AuditLog:
    """Final results in a file of JSON lines, or in memory without a path."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a+b")
        self._results: dict[str, Result] = {}
        if self._file is not None:
            self._file.seek(0)
            torn = b""
            for line in self._file:
                torn = b"" if line.endswith(b"\n") else line
                self._take(line)
            if torn:  # a run was killed during a write
                self._file.write(b"\n")

    def find(self, key: str) -> Result | None:
        """Return the logged result of a sequence, or None."""
        return self._results.get(key)

    def note(self, key: str, result: Result) -> None:
        """Write a final result, and flush the file."""
        self._results[key] = result
        if self._file is not None:
            self._file.write(orjson.dumps({"key": key, "result": asdict(result)}) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _take(self, line: bytes) -> None:
        try:
            noted = orjson.loads(line)
            self._results[noted["key"]] = Result(**noted["result"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return  # incomplete, or of another version: the sequence is scored again


async def audit_rows(
    rows: AsyncIterator[Any], scorer: Scorer, terms: AuditOptions, journal: AuditLog, seen: Callable[[Result], None]
) -> list[Result]:
    """Return the results in the order of the rows; `seen` is called with each result.

    Raises what the rows raise, and what `Send` raises when the engine is unreachable.
    """
    numbered: dict[int, Result] = {}
    reading = asyncio.Lock()

    async def work() -> None:
        while True:
            async with reading:
                try:
                    row = await anext(rows)
                except StopAsyncIteration:
                    return
                number = len(numbered)
                numbered[number] = _UNFINISHED
            numbered[number] = result = await _audited(row, scorer, terms, journal)
            seen(result)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(terms.at_once):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first failure ends the audit
    return list(numbered.values())


@dataclass(frozen=True, slots=True)
class Audited:
    """What was compared of a sequence, its scores, its assessment, and the version of the engine's weights if it is known."""

    compared: AuditSample
    scored: Scored
    finding: Assessment | None
    version: str | None


async def audit_one(recorded: AuditSample, scorer: Scorer, terms: AuditOptions) -> Audited:
    """Score a sequence and assess it; score it shifted too if that may explain the differences. Raises NotScored."""
    scored, reported = await scorer.score_all(recorded.token_ids, recorded.masks)
    version = reported or terms.policy_version
    recorded = recorded.comparable(terms.logprobs_mode, version)
    finding = await asyncio.to_thread(judge, recorded, scored, terms.tolerance)
    if await asyncio.to_thread(may_be_moved, finding, recorded, scored):
        for offset in OFFSETS:
            moved = {offset: await scorer.score(moved_ids(recorded.token_ids, offset))}
            finding = await asyncio.to_thread(judge, recorded, scored, terms.tolerance, moved)
            if finding is not None and finding.verdict == "shifted":
                break
    return Audited(recorded, scored, finding, version)


async def _audited(row: Any, scorer: Scorer, terms: AuditOptions, journal: AuditLog) -> Result:
    name = name_of(row)
    try:
        recorded = of_row(row)
    except ValueError as error:
        return Result(*name, NOT_SCORED, note=str(error))
    if row.get("images"):
        return Result(*name, NOTHING, note=_IMAGES, skipped=recorded.count)
    skipped, reason = recorded.skipped(terms.logprobs_mode, terms.policy_version)
    if skipped == recorded.count and not recorded.mask_offset:
        return Result(*name, NOTHING, note=reason or _UNLOGGED, skipped=skipped)
    key = await asyncio.to_thread(_key, recorded, scorer, terms)
    if (known := journal.find(key)) is not None:
        return known
    try:
        found = await audit_one(recorded, scorer, terms)
    except TooLong as why:
        result = Result(*name, TOO_LONG, note=str(why))
    except NotScored as why:
        return Result(*name, NOT_SCORED, note=str(why))  # the next run retries
    else:
        skipped, reason = recorded.skipped(terms.logprobs_mode, found.version)
        if found.finding:
            judged = of_finding(recorded, found.scored, found.finding)
        else:
            judged = Result(*name, NOTHING, note="" if skipped == recorded.count else _BEYOND)
        result = replace(judged, skipped=skipped, note="; ".join(filter(None, (judged.note, reason))))
    journal.note(key, result)
    return result


def _key(recorded: AuditSample, scorer: Scorer, terms: AuditOptions) -> str:
    depends = [asdict(recorded), scorer.kind, scorer.model, terms.tolerance, terms.logprobs_mode, terms.policy_version]
    return blake2b(orjson.dumps(depends, option=orjson.OPT_NON_STR_KEYS), digest_size=16).hexdigest()


class BackgroundAudit(BackgroundWork):
    """Score a share of the offered steps with the engines that sampled them, one at a time; no call waits for an audit.

    A step is skipped while another one waits, and if the engine cannot score it as it sampled it (`is_scorable`). Call `start`
    inside the event loop, `close` before the engines are closed.
    """

    def __init__(self, rate: float, upstream: "Upstream", metrics: "Metrics", clock: Clock) -> None:
        self._rate = rate
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._waiting: asyncio.Queue[Step] = asyncio.Queue(maxsize=1)

    def offer(self, step: Step, _live: "LiveRollout", _appended: "Appended", _bytes: int) -> None:
        """Audit a stored step if it is sampled, can be scored, and no other step waits. Never blocks."""
        if self._waiting.full() or not is_scorable(step):
            return
        if int.from_bytes(self._clock.entropy(4), "big") < self._rate * 2**32:
            self._waiting.put_nowait(step)

    async def _run(self) -> None:
        while True:
            step = await self._waiting.get()
            endpoint = next(
                (endpoint for endpoint in self._upstream.endpoints if endpoint.settings.url == step.engine.url), None
            )
            if endpoint is None:
                continue
            try:
                await self._audit(step, endpoint)
            except (NotScored, EngineError) as why:
                self._metrics.audits.labels(step.engine.name, NOT_SCORED).inc()
                LOG.warning("Step not audited: %s", why, extra={"fields": {"step_id": step.step_id}})

    async def _audit(self, step: Step, endpoint: "Endpoint") -> None:
        engine = await find_scorer(sender(self._upstream, endpoint), step.engine.kind, None)
        scorer = Scorer(engine.send, engine.kind, step.model_served or engine.model, engine.window)
        sample = of_choice(step, step.choices[0])  # the other choices of the call have the same prompt and engine
        version = sample.stretches[-1].policy_version  # the engine's at the end of the call
        found = await audit_one(sample, scorer, AuditOptions(policy_version=version))
        finding = found.finding
        if finding is None:
            return
        self._metrics.audits.labels(step.engine.name, finding.verdict).inc()
        await asyncio.to_thread(self._observe, step.engine.name, found.compared, found.scored)
        if finding.verdict != "aligned":
            fields = {"step_id": step.step_id, "verdict": finding.verdict, "max": finding.max, "note": finding.note}
            LOG.warning("Audited step is not aligned", extra={"fields": fields})

    def _observe(self, engine: str, recorded: AuditSample, scored: Scored) -> None:
        sizes = self._metrics.audit_logprob_difference.labels(engine)
        for pair in pairs_of(recorded, scored):
            sizes.observe(pair.size)


def is_scorable(step: Step) -> bool:
    """Return whether the engine that has just sampled a step can score it as it was recorded."""
    temperature, over = step.sampling.get("temperature"), {step.logprobs_over(choice) for choice in step.choices}
    return (
        step.exact
        and step.inherited is None
        and step.status == "complete"
        and step.engine.kind in SCORING_KINDS
        and (step.is_chat or step.dialect in {"completions", "sglang_generate"})
        and any(choice.logprobs for choice in step.choices)
        and (
            step.sampling.get("logprobs_mode", "raw_logprobs") == "raw_logprobs" or temperature == 1 or over == {"mask"}
        )
        and "truncated" not in over
        and not step.constrained
        and not recorded_images(step)  # ids without the images are another prompt
    )
