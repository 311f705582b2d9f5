"""What an audit tells: one result per sequence, as a table for people or JSON for programs.

Holds `Result` and its two shapes. It judges nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from proxy.audit.recorded import Recorded
from proxy.audit.verdict import Finding, Scored
from proxy.terminal.consoles import new_table
from proxy.terminal.escaping import visible

TOO_LONG, NOT_SCORED, NOTHING = "too long", "not scored", "nothing to compare"
_AROUND = 5  # ids shown on each side of the first token beyond the tolerance
_COLUMNS = ("rollout", "branch", "verdict", "tokens", "left out", "telling", "mean", "max", "first beyond", "note")
_NUMBERS = frozenset({"branch", "tokens", "left out", "telling", "mean", "max"})
_COLOURS = {"aligned": "green", TOO_LONG: "yellow", NOT_SCORED: "yellow", NOTHING: "yellow"}


@dataclass(frozen=True, slots=True)
class Result:
    """What is told of one sequence: a verdict of `verdict`, or why there is none.

    `count` tokens were compared; `left_out` have a recorded logprob that no engine can score again. `first` is the first
    token beyond the tolerance, with what is around it.
    """

    rollout_id: str
    branch: int
    verdict: str
    count: int = 0
    telling: int = 0
    mean: float | None = None
    max: float | None = None
    offset: int = 0
    first: dict[str, Any] | None = field(default=None)
    note: str = ""
    left_out: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether something of it was compared, and nothing is wrong with it."""
        return self.verdict == "aligned"

    @property
    def is_well(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self.is_aligned or self.verdict == NOTHING


def of_finding(recorded: Recorded, scored: Scored, finding: Finding) -> Result:
    """The result of a sequence that was judged."""
    return Result(
        recorded.name,
        recorded.branch,
        finding.verdict,
        count=finding.count,
        telling=finding.telling,
        mean=finding.mean,
        max=finding.max,
        offset=finding.offset,
        first=None if finding.first is None else _around(recorded, scored, finding.first),
        note=finding.note,
    )


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Everything, JSON-ready."""
    compared = [result for result in results if result.mean is not None]
    tokens = sum(result.count for result in compared)
    weighed = sum((result.mean or 0) * result.count for result in compared)
    return {
        "aligned": is_well(results),
        "verdicts": dict(Counter(result.verdict for result in results)),
        "tokens": tokens,
        "left_out": sum(result.left_out for result in results),
        "mean": weighed / tokens if tokens else None,
        "max": max((result.max or 0 for result in compared), default=None),
        "sequences": [asdict(result) for result in results],
    }


def is_well(results: Sequence[Result]) -> bool:
    """Whether a sequence is aligned, and each other one is or has nothing to compare: no comparison at all proves nothing."""
    return any(result.is_aligned for result in results) and all(result.is_well for result in results)


def table(results: Iterable[Result]) -> Table:
    """One line a sequence."""
    made = new_table((name, name in _NUMBERS, False) for name in _COLUMNS)
    for result in results:
        made.add_row(
            Text(visible(result.rollout_id)),
            str(result.branch),
            Text(result.verdict, _COLOURS.get(result.verdict, "red")),
            str(result.count),
            str(result.left_out),
            str(result.telling),
            _number(result.mean),
            _number(result.max),
            Text(_first(result.first)),
            Text(visible(result.note)),
        )
    return made


def _around(recorded: Recorded, scored: Scored, place: int) -> dict[str, Any]:
    stretch = recorded.stretch_at(place)
    ids = recorded.token_ids
    return {
        "place": place,
        "step_id": stretch.step_id if stretch else None,
        "before": list(ids[max(place - _AROUND, 0) : place]),
        "id": ids[place],
        "after": list(ids[place + 1 : place + 1 + _AROUND]),
        "recorded": recorded.logprobs[place],
        "scored": scored[place],
    }


def _first(first: dict[str, Any] | None) -> str:
    if first is None:
        return ""
    before, after = (" ".join(map(str, first[side])) for side in ("before", "after"))
    values = f"{_number(first['recorded'])} recorded, {_number(first['scored'])} scored"
    return f"{first['place']}: … {before} [{first['id']}] {after} … {values}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
