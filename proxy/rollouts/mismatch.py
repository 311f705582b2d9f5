"""Sums of the differences between a trainer's logprobs and the recorded ones: their addition, their checks, their verdicts.

`tokentape/mismatch_sums.py` computes and describes the sums of a part. Here l is a recorded logprob, t the trainer's, and
d is t - l.

What the ranks of a trainer reported of a batch are parts, and their sums, which processes add up in any order. The report of a
batch is one entity, changed by compare and set, which expires 25 hours after the last part: an hour after the longest lease.
"""

import asyncio
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import sqrt
from operator import add
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypedDict
from weakref import WeakValueDictionary

import msgspec
import orjson
from msgspec import Meta, Struct

from proxy.errors import Conflict, Damaged, UnprocessableRequest
from proxy.rollouts.rollout import damage_of, left_out
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import in_thread
from storage.errors import FieldsChanged
from storage.redis.store import Store
from storage.types import StoredEntity

UNIT: Final = 1e-9  # of all sums; counts are numbers
BINS: Final = 12  # of l
HISTOGRAM: Final = 64  # bins of |d|: eight for each power of ten from 1e-6
MAX_VALUES: Final = 256  # of a dimension, over all parts
ALL: Final = "all"
DIMENSIONS: Final = (
    "lag", "endpoint", "engine", "temperature", "truncation", "place", "position", "boundary", "constrained", "model",
)  # fmt: skip
TOO_FEW: Final = "too_few"
UNKNOWN: Final = "unknown"
ABOUT_WEIGHTS: Final = ("temperature", "stale_endpoint", "heavy_tail", "lag")  # older weights have the same effects

_COUNT, _D, _SIZE, _SQUARE = range(4)  # of a bin

# Thresholds that are no settings: they separate a cause from noise, or from all that is plausible.
_SHIFTED: Final = 0.2  # of the mean |d|
_OTHER_TOKENS: Final = 3.0  # the median of |d|; or, with a correlation of t and l as of unrelated ones:
_UNRELATED_MEDIAN: Final = 1.0
_UNRELATED: Final = 0.5
_SUPPORT_Z: Final = -10.0
_SUPPORT_MEAN: Final = -0.002  # besides the bias of noise
_SUPPORT_INSIDE: Final = 0.95  # of the tokens with l 0
_SLOPE_ERRORS: Final = 10.0
_SCALED: Final = 0.9  # the correlation of t and l, if one is of another temperature
_SHARE: Final = 0.2  # of the variance of d, which l then explains at least
_Z: Final = 6.0
_EXCESS: Final = 0.001  # of a mean |d|, below which a ratio is none
_TAIL_MEDIAN: Final = 0.1

MAX_ROWS: Final = 20_000  # of a part
MAX_ROWS_OF_BATCH: Final = 100_000
_FIELD: Final = "mismatch"
_PREFIX: Final = "mismatch:"
_SHOWN: Final = 100
_LISTED: Final = 200  # batches and reports that are listed at once
_MOST_LISTED: Final = 4000  # each report takes a fraction of a millisecond

# All ranks report at the same time: parts that this process adds to the same report wait instead of being merged again.
_TURNS: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()


_Value: TypeAlias = Annotated[str, Meta(max_length=256)]
_Histogram: TypeAlias = Annotated[list[int], Meta(min_length=HISTOGRAM, max_length=HISTOGRAM)]
_Four: TypeAlias = Annotated[list[int], Meta(min_length=4, max_length=4)]
_Five: TypeAlias = Annotated[list[int], Meta(min_length=5, max_length=5)]
_Six: TypeAlias = Annotated[list[int], Meta(min_length=6, max_length=6)]


class Cell(TypedDict):
    """For each of 12 bins of l: tokens, and sums of d, |d|, d² and exp(d) - 1 - d; the tokens by |d|; those above 0.5."""

    bins: Annotated[list[_Five], Meta(min_length=BINS, max_length=BINS)]
    histogram: _Histogram
    tail: int


class Sums(TypedDict):
    """What `tokentape.mismatch` returns. All sums are integers in units of 1e-9."""

    cells: dict[str, Annotated[dict[_Value, Cell], Meta(max_length=MAX_VALUES)]]
    uncertain: _Histogram
    neighbours: _Four
    slopes: Annotated[dict[_Value, _Six], Meta(max_length=MAX_VALUES)]
    support: Annotated[dict[_Value, _Five], Meta(max_length=MAX_VALUES)]
    sequences: _Four


class Rules(NamedTuple):
    """The thresholds of the verdicts that are settings (`mismatch`)."""

    min_tokens: int
    numeric: float
    slope: float
    endpoint_ratio: float
    boundary_ratio: float
    lag_ratio: float
    tail_share: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause, what it is about (an endpoint, a temperature) and its figures."""

    verdict: str
    of: str | None = None
    why: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"verdict": self.verdict, "of": self.of, "why": self.why, "figures": dict(self.figures)}


def merged(first: Any, second: Any) -> Any:
    """Add two sums: values of lists and objects one by one. Objects may lack keys; what one has is kept."""
    if isinstance(first, dict):
        shared = {key: merged(value, second[key]) if key in second else value for key, value in first.items()}
        return {**second, **shared}
    if isinstance(first, list):
        if isinstance(first[0], int):
            return list(map(add, first, second))
        return list(map(merged, first, second))
    return first + second


def contradiction(sums: Mapping[str, Any]) -> str | None:
    """Return why these cannot be the sums of any tokens; None if they can."""
    cells = sums["cells"]
    if set(cells) != {ALL, *DIMENSIONS} or set(cells[ALL]) - {ALL}:
        return f"cells are not those of {', '.join((ALL, *DIMENSIONS))}"
    tokens = tokens_of(sums)
    for dimension, values in cells.items():
        for value, cell in values.items():
            if why := _contradiction_in(cell):
                return f"cell {value!r} of {dimension}: {why}"
    for dimension in DIMENSIONS:
        forced = "true" if dimension == "constrained" else None  # their tokens are in no other cell
        counted = sum(_tokens(cell) for value, cell in cells[dimension].items() if value != forced)
        if counted > tokens or (counted < tokens and dimension != "endpoint"):
            return f"the cells of {dimension} have {counted} tokens, not {tokens}"
    return _contradiction_outside(sums, tokens)


def _contradiction_outside(sums: Mapping[str, Any], tokens: int) -> str | None:
    """Return why the sums outside of cells cannot be of so many tokens."""
    if sum(sums["uncertain"]) > tokens or min(sums["uncertain"]) < 0:
        return "more uncertain tokens than tokens"
    if sums["neighbours"][0] > tokens or min(sums["neighbours"]) < 0:
        return "more neighbours than tokens"
    for name, dimension in (("slopes", "temperature"), ("support", "truncation")):
        cells = sums["cells"][dimension]
        if any(not 0 < row[0] <= _tokens(cells.get(value)) for value, row in sums[name].items()):
            return f"{name} has other tokens than the cells of {dimension}"
    rows, total, size, square = sums["sequences"]
    if min(rows, size, square) < 0 or abs(total) > size + rows + 1 or (not rows and square):
        return "the sum of the rows' d is larger than that of its absolute values"
    if any(not 0 <= inside <= certain <= count for count, _, _, certain, inside in sums["support"].values()):
        return "support has more certain tokens than tokens"
    return None


def _contradiction_in(cell: Mapping[str, Any]) -> str | None:
    count = _tokens(cell)
    if count < 1 or min(*(row[_COUNT] for row in cell["bins"]), *cell["histogram"]) < 0:
        return "it has no tokens, or less than none in a bin"
    if sum(cell["histogram"]) != count:
        return f"its histogram has {sum(cell['histogram'])} tokens, its bins {count}"
    if not 0 <= cell["tail"] <= count:
        return f"its tail has {cell['tail']} of {count} tokens"
    for tokens, d, size, square, above in cell["bins"]:
        slack = tokens + 1  # of rounding, in units
        if abs(d) > size + slack or min(size, square) < 0 or above < -slack or (not tokens and (size or square)):
            return "the sum of d is larger than that of its absolute values"
        if size * size * UNIT > (tokens * square + tokens * slack) * (1 + 1e-6) + 2 * size * slack * UNIT:
            return "the sum of its squares is too small"
    return None


def _tokens(cell: Mapping[str, Any] | None) -> int:
    return 0 if cell is None else sum(row[_COUNT] for row in cell["bins"])


def tokens_of(sums: Mapping[str, Any]) -> int:
    """Return the number of tokens."""
    return _tokens(sums["cells"][ALL].get(ALL))


def mean_size(cell: Mapping[str, Any] | None) -> float | None:
    """Return the mean |d| of a cell; None without tokens."""
    if cell is None or not (count := _tokens(cell)):
        return None
    return float(sum(row[_SIZE] for row in cell["bins"]) * UNIT / count)


def described(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means of all cells, of all tokens, and of the logs of the ratios of whole rows, for people."""
    rows, *totals = sums["sequences"]
    means = (total * UNIT / rows if rows else None for total in totals)
    return {
        "tokens": tokens_of(sums),
        "sequences": {"rows": rows, **dict(zip(("mean", "abs_mean", "square_mean"), means, strict=True))},
        "cells": {
            dimension: {value: _described(cell) for value, cell in cells.items()}
            for dimension, cells in sums["cells"].items()
        },
    }


def _described(cell: Mapping[str, Any]) -> dict[str, Any]:
    count = _tokens(cell)
    totals = [sum(column) * UNIT for column in zip(*cell["bins"], strict=True)]
    return {
        "tokens": count,
        "mean": totals[1] / count,
        "abs_mean": totals[2] / count,
        "square_mean": totals[3] / count,
        "kl": totals[4] / count,
        "abs_median": median(cell["histogram"]),
        "tail": cell["tail"] / count,
    }


def median(histogram: Sequence[int]) -> float:
    """Return the median |d| of a histogram: the middle of its bin; 0.0 without tokens."""
    half, seen = sum(histogram) / 2, 0
    for number, count in enumerate(histogram):
        seen += count
        if count and seen >= half:
            return float(10 ** ((number + 0.5) / 8 - 6))
    return 0.0


def verdicts_of(sums: Mapping[str, Any], rules: Rules) -> list[Verdict]:
    """Return the causes that explain the sums, the first ones first; at least one."""
    tokens = tokens_of(sums)
    if tokens < rules.min_tokens:
        return [Verdict(TOO_FEW, why=f"{tokens} tokens were scored; a verdict takes {rules.min_tokens}")]
    misplaced = [*_shifted(sums), *_other_tokens(sums, rules)][:1]
    if misplaced:
        return misplaced  # all other figures are of pairs of different tokens
    fresh = _tokens(sums["cells"]["lag"].get("0"))
    scaled = [*_truncated_support(sums), *_temperature(sums, rules)]
    stale, lag = list(_stale_endpoints(sums, rules)), list(_lag(sums, rules))
    found = [*scaled, *stale, *_boundaries(sums, rules, [*stale, *lag])]
    if not scaled:
        found += _heavy_tail(sums, rules, found)
    found += lag
    if fresh < _few(rules):
        why = f"{fresh} tokens are of the reported version: verdicts about weights take {_few(rules)} of them"
        return [*(each for each in found if each.verdict not in ABOUT_WEIGHTS), Verdict(UNKNOWN, why=why)]
    if found:
        return found
    mean = mean_size(sums["cells"][ALL][ALL]) or 0.0
    figures = {"abs_mean": mean}
    if mean < rules.numeric:
        return [
            Verdict("numeric", why=f"the mean |d| is {mean:.2g}, as of other kernels or precision", figures=figures)
        ]
    return [Verdict("unexplained", why=f"the mean |d| is {mean:.2g}, and no rule names a cause", figures=figures)]


def _few(rules: Rules) -> int:
    return rules.min_tokens // 4


def _shifted(sums: Mapping[str, Any]) -> Iterable[Verdict]:
    count, ahead, behind, own = sums["neighbours"]
    if not count:
        return
    nearest = min(ahead, behind)
    if nearest < _SHIFTED * own:
        where = "the next token" if ahead < behind else "the token before"
        figures = {"abs_mean": own * UNIT / count, "abs_mean_shifted": nearest * UNIT / count}
        yield Verdict("shifted", why=f"the trainer's logprob of a token is the engine's of {where}", figures=figures)


def _other_tokens(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    middle, slopes = median(sums["uncertain"]), list(sums["slopes"].values())
    fit = _fit([sum(column) for column in zip(*slopes, strict=True)], rules) if slopes else None
    is_unrelated = fit is not None and fit.correlation < _UNRELATED and middle > _UNRELATED_MEDIAN
    if middle > _OTHER_TOKENS or is_unrelated:
        figures = {"abs_median": middle} | ({} if fit is None else {"correlation": fit.correlation})
        yield Verdict("other_tokens", None, "the trainer's logprobs are of other tokens than the engine's", figures)


def _truncated_support(sums: Mapping[str, Any]) -> Iterable[Verdict]:
    for label, (count, total, squares, certain, inside) in sorted(sums["support"].items()):
        mean, square = total * UNIT / count, squares * UNIT / count
        # Noise alone has the mean -var/2: of sampled tokens, exp(d) has the mean 1.
        variance = max(square - mean * mean, 1e-18)
        excess = mean + min(variance / 2, 0.01)
        z = excess / sqrt(variance / count)
        if z < _SUPPORT_Z and excess < _SUPPORT_MEAN and inside >= _SUPPORT_INSIDE * certain:
            yield Verdict(
                "truncated_support",
                label,
                "the engine's logprobs are over the kept tokens, the trainer's over all",
                {"mean": mean, "z": z, "tokens": count},
            )


class _Fit(NamedTuple):
    tokens: int
    lean: float  # the slope of d on l
    error: float
    share: float  # of the variance of d that l explains
    correlation: float  # of t and l


def _fit(sums: Sequence[int], rules: Rules) -> _Fit | None:
    """Fit d to l; None with few tokens, or of one l."""
    count = sums[0]
    mean, d, ll, ld, dd = (value * UNIT / count for value in sums[1:])
    spread = ll - mean * mean
    if count < _few(rules) or spread < 1e-6:
        return None
    shared, own = ld - mean * d, max(dd - d * d, 0.0)
    lean, share = shared / spread, shared * shared / (spread * max(own, 1e-12))
    error = sqrt(max(own - lean * shared, 0.0) / (count * spread))
    correlation = (spread + shared) / sqrt(spread * max(spread + own + 2 * shared, 1e-12))
    return _Fit(count, lean, error, share, correlation)


def _temperature(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    """Other contexts and weights have a slope, too, to the mean of t; with a temperature, t is also close to a line."""
    for label, slope in sorted(sums["slopes"].items()):
        fit = _fit(slope, rules)
        if fit is None or fit.correlation < _SCALED or fit.share < _SHARE:
            continue
        if abs(fit.lean) > max(rules.slope, _SLOPE_ERRORS * fit.error):
            figures = {"slope": 1 + fit.lean, "error": fit.error, "correlation": fit.correlation, "tokens": fit.tokens}
            yield Verdict("temperature", label, _direction(label, fit.lean), figures)


def _direction(label: str, lean: float) -> str:
    try:
        temperature = float(label)
    except ValueError:  # unknown, or several
        temperature = 1.0
    if temperature == 1.0:
        return f"the trainer divides logits by a temperature of about {1 / (1 + lean):.2g} times the engine's"
    if (temperature < 1) == (lean > 0):
        return "the trainer divides logits by the temperature, and the engine's logprobs are raw"
    return "the trainer does not divide logits by the temperature, and the engine's logprobs are of the divided ones"


@dataclass(frozen=True, slots=True)
class _Excess:
    ratio: float
    z: float
    excess: float  # of the mean |d|


def _excess(cell: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> _Excess | None:
    """Compare the mean |d| of a cell with other cells' within the bins of l; None without tokens in common bins."""
    rest = [
        [sum(column) for column in zip(*rows, strict=True)] for rows in zip(*(it["bins"] for it in others), strict=True)
    ]
    own = expected = variance = 0.0
    tokens = 0
    for mine, theirs in zip(cell["bins"], rest, strict=False):
        count, other = mine[_COUNT], theirs[_COUNT]
        if not count or not other:
            continue
        mean, theirs_mean = mine[_SIZE] * UNIT / count, theirs[_SIZE] * UNIT / other
        own += mine[_SIZE] * UNIT
        expected += count * theirs_mean
        tokens += count
        variance += count * max(mine[_SQUARE] * UNIT / count - mean * mean, 0.0)
        variance += count * count * max(theirs[_SQUARE] * UNIT / other - theirs_mean * theirs_mean, 0.0) / other
    if not tokens:
        return None
    z = (own - expected) / sqrt(variance) if variance > 0 else 0.0
    return _Excess(own / max(expected, 1e-12), z, (own - expected) / tokens)


def _is_larger(found: _Excess | None, ratio: float) -> bool:
    return found is not None and found.ratio >= ratio and found.z > _Z and found.excess > _EXCESS


def _figures(found: _Excess, cell: Mapping[str, Any]) -> dict[str, float]:
    return {"ratio": found.ratio, "z": found.z, "abs_mean": mean_size(cell) or 0.0, "tokens": _tokens(cell)}


def _stale_endpoints(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    cells = sums["cells"]["endpoint"]
    for label, cell in sorted(cells.items()):
        found = _excess(cell, [other for name, other in cells.items() if name != label])
        if found is not None and _is_larger(found, rules.endpoint_ratio):
            why = "its tokens differ more than those of the other endpoints: it may have older weights"
            yield Verdict("stale_endpoint", label, why, _figures(found, cell))


def _boundaries(sums: Mapping[str, Any], rules: Rules, weights: Sequence[Verdict]) -> Iterable[Verdict]:
    """Judge first tokens, and replies that do not start their row, which may more often be of older `weights`."""
    cells = sums["cells"]["place"]
    found = _excess(cells["first"], [cells["rest"]]) if cells.keys() == {"first", "rest"} else None
    if found is not None and _is_larger(found, rules.boundary_ratio):
        why = "the first tokens of replies differ more than the rest"
        yield Verdict("boundaries", "first", why, _figures(found, cells["first"]))
        return
    kinds = sums["cells"]["boundary"]
    later = [cell for kind, cell in kinds.items() if kind != "start"]
    found = _excess(rest := merged_cells(later), [kinds["start"]]) if later and "start" in kinds else None
    least = rules.boundary_ratio * max([1.0, *(each.figures["ratio"] for each in weights)])
    if found is not None and _is_larger(found, least):
        why = "replies that follow others in their row differ more than those that start one"
        yield Verdict("boundaries", "later", why, _figures(found, rest))


def _heavy_tail(sums: Mapping[str, Any], rules: Rules, found: Sequence[Verdict]) -> Iterable[Verdict]:
    """Judge the tail of the tokens at lag 0 that no other verdict explains."""
    cells = sums["cells"]
    if any(each.of == "later" for each in found):
        return  # of most tokens
    if found:  # cells of endpoints have no first tokens
        stale = {each.of for each in found if each.verdict == "stale_endpoint"}
        kept = [cell for label, cell in cells["endpoint"].items() if label not in stale]
    else:
        kept = [cell for label, cell in cells["lag"].items() if label == "0"]
    count = sum(map(_tokens, kept))
    share = sum(cell["tail"] for cell in kept) / count if count else 0.0
    middle = median(sums["uncertain"])
    if count >= rules.min_tokens and share > rules.tail_share and middle < _TAIL_MEDIAN:
        why = "few tokens differ much: experts are routed otherwise, or the numerics of single tokens differ"
        yield Verdict("heavy_tail", None, why, {"share": share, "abs_median": middle, "tokens": count})


def _lag(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    cells = sums["cells"]["lag"]
    fresh = cells.get("0")
    older = [
        cell for label, cell in cells.items() if label not in ("0", UNKNOWN, "other") and not label.startswith("-")
    ]
    if fresh is None or not older or (mean_size(fresh) or 0.0) >= rules.numeric:
        return
    rest = merged_cells(older)
    found = _excess(rest, [fresh])
    if found is not None and _is_larger(found, rules.lag_ratio):
        why = "tokens of older weights differ more; those of the reported version are close"
        yield Verdict("lag", None, why, _figures(found, rest))


def merged_cells(cells: Sequence[Mapping[str, Any]]) -> Any:
    """Add cells up."""
    total: Any = cells[0]
    for cell in cells[1:]:
        total = merged(total, cell)
    return total


class Part(Struct, frozen=True, array_like=True):
    """Rows that a rank reported together, as hashes."""

    rank: int
    rows: frozenset[str]


class Report(Struct, frozen=True, array_like=True):
    """The parts of a batch that were counted, and their sums."""

    policy: str
    version: str
    parts: tuple[Part, ...]
    sums: Sums

    def with_part(self, part: Part, version: str, sums: Sums) -> "Report":
        """Return the report with another part; itself if that is counted. Raises Conflict or UnprocessableRequest."""
        if version != self.version:
            raise UnprocessableRequest(
                f"Other parts of the batch have policy_version {self.version!r}, this one {version!r}.",
                param="policy_version",
            )
        if part in self.parts:
            return self
        overlapping = next((each for each in self.parts if each.rows & part.rows), None)
        if overlapping is not None:
            shared = len(overlapping.rows & part.rows)
            raise Conflict(
                f"{shared} rows of this part of rank {part.rank} are in another part, of rank {overlapping.rank}: each row "
                "counts once. Report the rows of each rank and micro batch once, for one forward pass.",
                param="rows",
            )
        if sum(len(each.rows) for each in self.parts) + len(part.rows) > MAX_ROWS_OF_BATCH:
            raise UnprocessableRequest(f"The parts of a batch have at most {MAX_ROWS_OF_BATCH:,} rows.", param="rows")
        return Report(self.policy, self.version, (*self.parts, part), merged(self.sums, sums))

    def written(self) -> bytes:
        """Return it as stored bytes. Raises UnprocessableRequest for a sum or a number of values that is too large."""
        sums = self.sums
        counted = {**sums["cells"], "slopes": sums["slopes"], "support": sums["support"]}
        for name, values in counted.items():
            if len(values) > MAX_VALUES:  # type: ignore[arg-type]
                raise UnprocessableRequest(f"{name} has more than {MAX_VALUES} values.", param="sums")
        parts = [[part.rank, [*part.rows]] for part in self.parts]
        try:
            return zlib.compress(orjson.dumps([self.policy, self.version, parts, sums]), 1)
        except TypeError:
            raise UnprocessableRequest("A sum is larger than 64 bits.", param="sums") from None


def part_from(rank: int, rows: Mapping[str, Sequence[int]], given: Mapping[str, Any]) -> tuple[Part, Sums]:
    """Return a part and its sums, checked. Raises UnprocessableRequest."""
    if sum(map(len, rows.values())) > MAX_ROWS:
        raise UnprocessableRequest(f"A part has at most {MAX_ROWS:,} rows; report these in several.", param="rows")
    try:
        sums = msgspec.convert(given, Sums)
    except msgspec.ValidationError as error:
        raise UnprocessableRequest(f"sums: {error}. Send what tokentape.mismatch returns.", param="sums") from None
    why = contradiction(sums)
    if why is not None:
        raise UnprocessableRequest(f"The sums contradict each other: {why}.", param="sums")
    hashes = frozenset(_hash_of(name, branch) for name, branches in rows.items() for branch in branches)
    if len(hashes) != sums["sequences"][0]:
        raise UnprocessableRequest(
            f"The sums contradict each other: they are of {sums['sequences'][0]} rows, and rows has {len(hashes)}.",
            param="sums",
        )
    return Part(rank, hashes), sums


async def count_part(store: Store, batch_id: str, report: Report, *, now_ms: int) -> tuple[Report | None, Report]:
    """Add a report of one part to what is stored of its batch; return what was there before, and what is there now.

    Both are the same if the part is counted already. Raises Conflict, UnprocessableRequest, or Damaged.
    """
    name = _PREFIX + batch_id
    turn = _TURNS.setdefault(name, asyncio.Lock())
    async with turn:
        stored = await store.mismatches.open(name, {}, now_ms=now_ms)
        while True:
            known, total, written = await in_thread(_added, stored, report)
            if total is known:
                return known, total
            expect = {_FIELD: stored.fields.get(_FIELD)}
            try:
                if await store.mismatches.update_if(name, {_FIELD: written}, expect=expect, now_ms=now_ms) is not None:
                    return known, total
                stored = await store.mismatches.open(name, {}, now_ms=now_ms)  # it has expired
            except FieldsChanged as changed:  # another process added a part, or this one did and lost the response
                stored = changed.rollout


def _added(stored: StoredEntity, report: Report) -> tuple[Report | None, Report, bytes]:
    known, (part,) = _read(stored), report.parts
    total = report if known is None else known.with_part(part, report.version, report.sums)
    return known, total, b"" if total is known else total.written()


async def read_report(store: Store, batch_id: str) -> Report | None:
    """Return what was reported of a batch. Raises Damaged."""
    stored = await store.mismatches.get(_PREFIX + batch_id)
    return None if stored is None else await in_thread(_read, stored)


async def newest_reports(store: Store, policy: str, rules: Rules, metrics: Metrics) -> dict[str, Any]:
    """Return a summary of each of the newest reports of a policy, of at most 100, newest first, and the means of the newest.

    They are among the newest 4,000 batches and reports of all policies. Damaged ones are omitted.
    """
    batches: list[dict[str, Any]] = []
    means, cursor = None, None
    for _ in range(0, _MOST_LISTED, _LISTED):
        page = await store.mismatches.list(cursor=cursor, limit=_LISTED)
        read = await store.mismatches.get_each([name for name in page.names if name.startswith(_PREFIX)])
        stored = [each for each in read if each is not None]
        of_page, newest = await in_thread(_summarized, stored, policy, rules, metrics)
        batches, means, cursor = batches + of_page, means or newest, page.cursor
        if cursor is None or len(batches) >= _SHOWN:
            break
    return {"batches": batches[:_SHOWN], "newest": means}


def _summarized(
    found: Sequence[StoredEntity], policy: str, rules: Rules, metrics: Metrics
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return a summary of each of these reports that is of the policy, and the means of the first."""
    batches, means = [], None
    for stored in found:
        try:
            report = _read(stored)
        except Damaged as damaged:
            left_out([damaged], metrics)
            continue
        if report is None or report.policy != policy:
            continue
        means = means or described(report.sums)
        batches.append(
            {
                "batch_id": stored.name.removeprefix(_PREFIX),
                "policy_version": report.version,
                "tokens": tokens_of(report.sums),
                "abs_mean": mean_size(report.sums["cells"][ALL].get(ALL)),
                "verdicts": [verdict.verdict for verdict in verdicts_of(report.sums, rules)],
            }
        )
    return batches, means


def _read(stored: StoredEntity) -> Report | None:
    """Return what is stored; None before the first part. Raises Damaged."""
    raw = stored.fields.get(_FIELD)
    if raw is None:
        return None
    with damage_of("mismatch", stored.name.removeprefix(_PREFIX)):
        try:
            return msgspec.json.decode(zlib.decompress(raw), type=Report)
        except zlib.error as error:
            raise ValueError(str(error)) from None


def _hash_of(rollout_id: str, branch: int) -> str:
    return blake2b(f"{branch}\0{rollout_id}".encode(), digest_size=8).hexdigest()
