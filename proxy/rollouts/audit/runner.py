"""The audit of many rows, concurrently, with a log from which an interrupted run resumes.

Rule 1: the log has final results only: a sequence is not logged if the engine was unreachable or failed.
Rule 2: the log identifies a sequence by everything that its result depends on except the engine's weights: ids, logprobs,
        tolerance, model. Audit other weights with another log.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from proxy.rollouts.audit.report import NOT_SCORED, NOTHING, TOO_LONG, Result, of_finding
from proxy.rollouts.audit.sample import OFFSETS, AuditSample, LogprobsMode, name_of, of_row
from proxy.rollouts.audit.verdict import Assessment, Scored, judge, may_be_moved, moved_ids
from proxy.rollouts.scoring.requests import NotScored, Scorer, TooLong


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of an audit. `at_once`: the number of sequences that the engine scores concurrently.

    One vLLM 0.32 in float32 scores its own samples within 1e-4; bfloat16, other batch sizes and other kernels differ by more.
    0.01, one percent of a likelihood, is far below the effect of a wrong token, and may be too strict for them.
    """

    tolerance: float = 0.01
    logprobs_mode: LogprobsMode = "raw_logprobs"
    at_once: int = 4


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

    def __repr__(self) -> str:
        return f"<AuditLog of {len(self._results)} results>"

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


async def audit_one(recorded: AuditSample, scorer: Scorer, terms: AuditOptions) -> tuple[Scored, Assessment | None]:
    """Score a sequence and assess it; score it shifted too if that may explain the differences. Raises NotScored."""
    recorded = recorded.comparable(terms.logprobs_mode)
    scored = await scorer.score(recorded.token_ids, recorded.masks)
    finding = await asyncio.to_thread(judge, recorded, scored, terms.tolerance)
    if await asyncio.to_thread(may_be_moved, finding, recorded, scored):
        for offset in OFFSETS:
            moved = {offset: await scorer.score(moved_ids(recorded.token_ids, offset))}
            finding = await asyncio.to_thread(judge, recorded, scored, terms.tolerance, moved)
            if finding is not None and finding.verdict == "shifted":
                break
    return scored, finding


async def _audited(row: Any, scorer: Scorer, terms: AuditOptions, journal: AuditLog) -> Result:
    name = name_of(row)
    try:
        recorded = of_row(row)
    except ValueError as error:
        return Result(*name, NOT_SCORED, note=str(error))
    if row.get("images"):
        return Result(*name, NOTHING, note=_IMAGES, skipped=recorded.count)
    skipped, reason = recorded.skipped(terms.logprobs_mode)
    if skipped == recorded.count and not recorded.mask_offset:
        return Result(*name, NOTHING, note=reason or _UNLOGGED, skipped=skipped)
    key = await asyncio.to_thread(_key, recorded, scorer, terms)
    if (known := journal.find(key)) is not None:
        return known
    try:
        scored, finding = await audit_one(recorded, scorer, terms)
    except TooLong as why:
        result = Result(*name, TOO_LONG, note=str(why))
    except NotScored as why:
        return Result(*name, NOT_SCORED, note=str(why))  # the next run retries
    else:
        judged = of_finding(recorded, scored, finding) if finding else Result(*name, NOTHING, note=_BEYOND)
        result = replace(judged, skipped=skipped, note="; ".join(filter(None, (judged.note, reason))))
    journal.note(key, result)
    return result


def _key(recorded: AuditSample, scorer: Scorer, terms: AuditOptions) -> str:
    depends = [asdict(recorded), scorer.kind, scorer.model, terms.tolerance, terms.logprobs_mode]
    return blake2b(orjson.dumps(depends, option=orjson.OPT_NON_STR_KEYS), digest_size=16).hexdigest()


_IMAGES = "the prompt has images, without which its ids are another prompt"
_UNFINISHED = Result("", 0, NOT_SCORED)
_UNLOGGED = "no logprobs: no token is trained, or none were requested (record.logprobs: off)"
_BEYOND = "the only logprob is of the last token of a full context window, which cannot be scored as a prompt"
