"""Sums of the differences between a trainer's logprobs and the recorded ones: their addition, their checks, their verdicts.

`tokentape/mismatch_sums.py` computes and describes the sums of a part. Here l is a recorded logprob, t the trainer's, and
d is t - l. The functions are pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final

UNIT: Final = 1e-9  # of all sums; counts are numbers
BINS: Final = 12  # of l
HISTOGRAM: Final = 64  # bins of |d|: eight for each power of ten from 1e-6
LARGEST: Final = 2**63 - 1
ALL: Final = "all"
DIMENSIONS: Final = (
    "lag", "endpoint", "engine", "temperature", "truncation", "place", "position", "boundary", "constrained", "model",
)  # fmt: skip
VERDICTS: Final = (
    "shifted", "other_tokens", "truncated_support", "temperature", "stale_endpoint", "boundaries", "heavy_tail", "lag",
    "numeric", "unexplained",
)  # fmt: skip
TOO_FEW: Final = "too_few"
UNKNOWN: Final = "unknown"
ABOUT_WEIGHTS: Final = ("temperature", "stale_endpoint", "lag")

_COUNT, _D, _SIZE, _SQUARE = range(4)  # of a bin


@dataclass(frozen=True, slots=True)
class Rules:
    """The thresholds of the verdicts."""

    tokens: int = 2000  # none with fewer
    shifted: float = 0.2  # of the mean |d|
    other_tokens: float = 3.0  # the median of |d|
    support_z: float = -10.0
    support_mean: float = -0.002  # besides the bias of noise
    support_inside: float = 0.95  # of the tokens with l 0
    slope: float = 0.03
    slope_errors: float = 10.0
    endpoint: float = 1.5  # times the others
    boundaries: float = 3.0  # times the rest
    lag: float = 1.5  # times lag 0
    z: float = 6.0
    excess: float = 0.001  # of a mean |d|, below which a ratio is none
    tail: float = 0.001
    tail_median: float = 0.1
    small: float = 0.05  # mean |d|


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
    if isinstance(first, Mapping):
        shared = {key: merged(value, second[key]) if key in second else value for key, value in first.items()}
        return {**second, **shared}
    if isinstance(first, list):
        return [merged(one, other) for one, other in zip(first, second, strict=True)]
    return first + second


def contradiction(sums: Mapping[str, Any]) -> str | None:
    """Return why these cannot be the sums of any tokens; None if they can."""
    for dimension, values in sums["cells"].items():
        for value, cell in values.items():
            if why := _contradiction_in(cell):
                return f"cell {value!r} of {dimension}: {why}"
    cells, tokens = sums["cells"], tokens_of(sums)
    if set(cells) != {ALL, *DIMENSIONS} or set(cells[ALL]) - {ALL}:
        return f"cells are not those of {', '.join((ALL, *DIMENSIONS))}"
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
    slopes = [slope[0] for slope in sums["slopes"].values()]
    if sum(slopes) > tokens or min(slopes, default=1) < 1:
        return "the slopes have other tokens than there are"
    supports = sums["support"].values()
    if any(not (0 <= inside <= certain <= count <= tokens and count) for count, _, _, certain, inside in supports):
        return "the support has other tokens than there are"
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


def _tokens(cell: Mapping[str, Any]) -> int:
    return sum(row[_COUNT] for row in cell["bins"])


def tokens_of(sums: Mapping[str, Any]) -> int:
    """Return the number of tokens."""
    cell = sums["cells"][ALL].get(ALL)
    return _tokens(cell) if cell else 0


def is_too_large(sums: Any) -> bool:
    """Return whether a sum is beyond 64 bits."""
    if isinstance(sums, Mapping):
        return any(map(is_too_large, sums.values()))
    return any(map(is_too_large, sums)) if isinstance(sums, list) else abs(sums) > LARGEST


def mean_size(cell: Mapping[str, Any] | None) -> float | None:
    """Return the mean |d| of a cell; None without tokens."""
    if cell is None or not (count := _tokens(cell)):
        return None
    return float(sum(row[_SIZE] for row in cell["bins"]) * UNIT / count)


def described(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means of all cells and of all tokens, for people."""
    return {
        "tokens": tokens_of(sums),
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


def verdicts_of(sums: Mapping[str, Any], rules: Rules | None = None) -> list[Verdict]:
    """Return the causes that explain the sums, in the order of VERDICTS; at least one."""
    rules, tokens = rules or Rules(), tokens_of(sums)
    if tokens < rules.tokens:
        return [Verdict(TOO_FEW, why=f"{tokens} tokens were scored; a verdict takes {rules.tokens}")]
    misplaced = [*_shifted(sums, rules), *_other_tokens(sums, rules)][:1]
    if misplaced:
        return misplaced  # all other figures are of pairs of different tokens
    has_fresh = "0" in sums["cells"]["lag"]
    support = list(_truncated_support(sums, rules))
    found = [*support, *_temperature(sums, rules), *_stale_endpoints(sums, rules), *_boundaries(sums, rules)]
    explained = {verdict.verdict for verdict in found}
    if not explained & {"truncated_support", "temperature"}:
        found += _heavy_tail(sums, rules, found)
    found += _lag(sums, rules)
    if not has_fresh:
        why = "no token is of the reported version, so that verdicts about weights are unknown"
        return [*(each for each in found if each.verdict not in ABOUT_WEIGHTS), Verdict(UNKNOWN, why=why)]
    if found:
        return found
    mean = mean_size(sums["cells"][ALL][ALL]) or 0.0
    figures = {"abs_mean": mean}
    if mean < rules.small:
        return [
            Verdict("numeric", why=f"the mean |d| is {mean:.2g}, as of other kernels or precision", figures=figures)
        ]
    return [Verdict("unexplained", why=f"the mean |d| is {mean:.2g}, and no rule names a cause", figures=figures)]


def _shifted(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    count, ahead, behind, own = sums["neighbours"]
    if not count:
        return
    nearest = min(ahead, behind)
    if nearest < rules.shifted * own:
        where = "the next token" if ahead < behind else "the token before"
        figures = {"abs_mean": own * UNIT / count, "abs_mean_shifted": nearest * UNIT / count}
        yield Verdict("shifted", why=f"the trainer's logprob of a token is the engine's of {where}", figures=figures)


def _other_tokens(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    middle = median(sums["uncertain"])
    if middle > rules.other_tokens:
        yield Verdict(
            "other_tokens",
            why="the trainer's logprobs are of other token ids than the engine's",
            figures={"abs_median": middle},
        )


def _truncated_support(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    for label, (count, total, squares, certain, inside) in sorted(sums["support"].items()):
        mean, square = total * UNIT / count, squares * UNIT / count
        # Noise alone has the mean -var/2: of sampled tokens, exp(d) has the mean 1.
        variance = max(square - mean * mean, 1e-18)
        excess = mean + min(variance / 2, 0.01)
        z = excess / sqrt(variance / count)
        if z < rules.support_z and excess < rules.support_mean and inside >= rules.support_inside * certain:
            yield Verdict(
                "truncated_support",
                label,
                "the engine's logprobs are over the kept tokens, the trainer's over all",
                {"mean": mean, "z": z, "tokens": count},
            )


def _temperature(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    for label, slope in sorted(sums["slopes"].items()):
        count = slope[0]
        mean, d, ll, ld, dd = (value * UNIT / count for value in slope[1:])
        spread = ll - mean * mean
        if count < rules.tokens // 4 or spread < 1e-6:
            continue
        lean = (ld - mean * d) / spread
        error = sqrt(max(dd - d * d - lean * lean * spread, 0.0) / (count * spread))
        if abs(lean) > rules.slope and abs(lean) > rules.slope_errors * error:
            yield Verdict(
                "temperature", label, _direction(label, lean), {"slope": 1 + lean, "error": error, "tokens": count}
            )


def _direction(label: str, lean: float) -> str:
    try:
        temperature = float(label)
    except ValueError:
        temperature = 1.0
    if temperature == 1.0:
        return (
            f"the trainer divides logits by {1 / (1 + lean):.2g} or so, and the engine by 1" if lean > -1 else "unknown"
        )
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


def _is_larger(found: _Excess | None, ratio: float, rules: Rules) -> bool:
    return found is not None and found.ratio >= ratio and found.z > rules.z and found.excess > rules.excess


def _figures(found: _Excess, cell: Mapping[str, Any]) -> dict[str, float]:
    return {"ratio": found.ratio, "z": found.z, "abs_mean": mean_size(cell) or 0.0, "tokens": _tokens(cell)}


def _stale_endpoints(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    cells = sums["cells"]["endpoint"]
    for label, cell in sorted(cells.items()):
        found = _excess(cell, [other for name, other in cells.items() if name != label])
        if found is not None and _is_larger(found, rules.endpoint, rules):
            why = "its tokens differ more than those of the other endpoints: it may have older weights"
            yield Verdict("stale_endpoint", label, why, _figures(found, cell))


def _boundaries(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    cells = sums["cells"]["place"]
    found = _excess(cells["first"], [cells["rest"]]) if cells.keys() == {"first", "rest"} else None
    if found is not None and _is_larger(found, rules.boundaries, rules):
        why = "the first tokens of replies differ more than the rest"
        yield Verdict("boundaries", None, why, _figures(found, cells["first"]))


def _heavy_tail(sums: Mapping[str, Any], rules: Rules, found: Sequence[Verdict]) -> Iterable[Verdict]:
    """Judge the tail of the tokens that no other verdict explains, at lag 0 if there are any."""
    cells = sums["cells"]
    stale = {each.of for each in found if each.verdict == "stale_endpoint"}
    if stale:
        kept = [cell for label, cell in cells["endpoint"].items() if label not in stale]
    elif any(each.verdict == "boundaries" for each in found):
        kept = [cells["place"]["rest"]]
    else:
        kept = [cells["lag"].get("0", cells[ALL][ALL])]
    count = sum(map(_tokens, kept))
    share = sum(cell["tail"] for cell in kept) / count if count else 0.0
    middle = median(sums["uncertain"])
    if count >= rules.tokens and share > rules.tail and middle < rules.tail_median:
        why = "few tokens differ much: experts are routed otherwise, or the numerics of single tokens differ"
        yield Verdict("heavy_tail", None, why, {"share": share, "abs_median": middle, "tokens": count})


def _lag(sums: Mapping[str, Any], rules: Rules) -> Iterable[Verdict]:
    cells = sums["cells"]["lag"]
    fresh = cells.get("0")
    older = [
        cell for label, cell in cells.items() if label not in ("0", UNKNOWN, "other") and not label.startswith("-")
    ]
    if fresh is None or not older or (mean_size(fresh) or 0.0) >= rules.small:
        return
    rest = merged_cells(older)
    found = _excess(rest, [fresh])
    if found is not None and _is_larger(found, rules.lag, rules):
        why = "tokens of older weights differ more; those of the reported version are close"
        yield Verdict("lag", None, why, _figures(found, rest))


def merged_cells(cells: Sequence[Mapping[str, Any]]) -> Any:
    """Add cells up."""
    total: Any = cells[0]
    for cell in cells[1:]:
        total = merged(total, cell)
    return total
