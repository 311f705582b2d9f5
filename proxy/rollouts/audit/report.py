"""Results of an audit, one per sequence, and their summary as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from proxy.rollouts.audit.sample import AuditSample
from proxy.rollouts.audit.verdict import Assessment, Scored

TOO_LONG, NOT_SCORED, NOTHING = "too long", "not scored", "nothing to compare"
_CONTEXT_IDS = 5  # ids shown on each side of the first token beyond the tolerance


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one sequence: a verdict of `verdict`, or the reason why it has none.

    `count` tokens were compared; `skipped` have a recorded logprob that no engine can score again. `first` is the first
    token beyond the tolerance, with the ids around it.
    """

    rollout_id: str
    branch: int
    verdict: str
    count: int = 0
    informative: int = 0
    mean: float | None = None
    max: float | None = None
    offset: int = 0
    first: dict[str, Any] | None = field(default=None)
    note: str = ""
    skipped: int = 0

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
    return Result(
        recorded.name,
        recorded.branch,
        finding.verdict,
        count=finding.count,
        informative=finding.informative,
        mean=finding.mean,
        max=finding.max,
        offset=finding.offset,
        first=None if finding.first is None else _around(recorded, scored, finding.first),
        note=finding.note,
    )


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
