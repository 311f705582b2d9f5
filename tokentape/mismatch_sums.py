"""Sums of the differences between a trainer's logprobs and the recorded ones, by what is known of each token. Requires numpy.

Rows of other formats than `sequences` are those of `sequences` that train the same tokens (`located`).
`Client.mismatch` posts the sums to `POST /batches/{id}/mismatch`, which adds up the parts of all ranks and names the cause.
Tokens are counted in cells: all tokens, and for each of ten dimensions one cell for each value. Every sum is an integer in
units of `UNIT`, so that parts add up to the same sums in any order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

UNIT: Final = 1e-9
EDGES: Final = (1e-5, 1e-3, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0)  # of the 12 bins of -l
CERTAIN: Final = 0.05  # l is above minus this in the first four bins
HISTOGRAM: Final = 64  # bins of |d|: eight for each power of ten from 1e-6
TAIL: Final = 0.5  # |d| above this is in the tail
LIMIT: Final = 30.0  # larger differences count as this
LIMIT_ROW: Final = 1e3  # of the sum of a row
LIMIT_K3: Final = 1e3  # the same of exp(d) - 1 - d
SLOPED: Final = (-12.0, -0.05)  # l of the tokens of a regression
FIRST: Final = 8  # tokens after a boundary that are counted as first
MAX_VALUES: Final = 16  # of a dimension; the tokens of rarer ones count as OTHER
OTHER: Final = "other"
ALL: Final = "all"
MAX_LABEL: Final = 64  # characters
_PROCESSED: Final = ("processed_logprobs", "processed_logits")
_UNKNOWN: Final = "unknown"
_ALMOST: Final = 0.02  # how far d of a certain token may be outside of [log top_p, 0]

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
_Key = tuple[str | None, int | tuple[str, ...] | None]


class _Run(NamedTuple):
    """A trained range of a row, and what is known of its tokens."""

    start: int
    length: int
    before: int  # how many tokens its choice sampled before it
    values: tuple[str, ...]  # of each name in `_OF_RUNS`
    low: float | None  # log top_p, if the logprobs are over the kept tokens


_OF_RUNS: Final = ("lag", "endpoint", "engine", "temperature", "truncation", "boundary", "constrained", "model")


def report(
    batch: Any,
    rows: Sequence[Mapping[str, Any]],
    logprobs: Sequence[Any],
    *,
    policy_version: str | int,
    rank: int,
    policy: str | None = None,
    cut: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Return the ID of a batch and the body of a report; `batch` may be its ID only.

    Raises ValueError as `mismatch` does, and for a row that is not of the batch or is there twice.
    """
    if not isinstance(batch, str):
        rollouts = {row["rollout_id"] for row in _listed(batch)}
        for number, row in enumerate(rows):
            if row.get("rollout_id") not in rollouts:
                raise ValueError(f"{_named(number, row)} is not of the batch")
    if len(rows) == len(logprobs):  # those without sampled tokens are no rows of the sums
        pairs = [pair for pair in zip(rows, logprobs, strict=True) if pair[0]["branch"] is not None or len(pair[1])]
        rows, logprobs = [row for row, _ in pairs], [values for _, values in pairs]
    branches: dict[str, list[int]] = {}
    seen = set()
    for number, row in enumerate(rows):
        if (key := (row["rollout_id"], row["branch"])) in seen:
            raise ValueError(f"{_named(number, row)} is reported twice")
        seen.add(key)
        branches.setdefault(row["rollout_id"], []).append(row["branch"])
    sums = mismatch(rows, logprobs, policy_version=policy_version, cut=cut)
    body = {"rank": rank, "policy_version": str(policy_version), "rows": branches, "sums": sums}
    return batch if isinstance(batch, str) else batch.batch_id, body if policy is None else body | {"policy": policy}


def elsewhere(rows: Iterable[Any]) -> list[str]:
    """Return the rollouts of those rows that only name their place."""
    names: dict[str, None] = {}
    for number, place in enumerate(map(_place, rows)):
        if place.get("rollout_id") is None:
            raise ValueError(
                f"row {number} has no rollout_id: pass the entries of `rows` of the claimed group, one for each row"
            )
        if "spans" not in place:
            names[place["rollout_id"]] = None
    return list(names)


def located(
    batch: Any, rows: Sequence[Any], exported: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[Mapping[str, Any]]:
    """Return the rows of format `sequences` that train the tokens of these rows; `exported` has those of each rollout.

    A row is one of `sequences`, or names its place: `rollout_id`, and `branch` (a number) or `step_ids`, as an entry of `rows`
    of a claimed group does. The ID alone is enough for the only row of a rollout. Raises ValueError, which names the row.
    """
    places = [_place(row) for row in rows]
    counts = Counter(map(_key, places))
    claimed = None if isinstance(batch, str) else Counter(map(_key, _listed(batch)))
    known = {name: _by_place(name, own, claimed) for name, own in exported.items()}
    given: Counter[_Key] = Counter()
    found = []
    for number, place in enumerate(places):
        if "spans" in place:
            found.append(place)
            continue
        if place.get("step_ids") == []:  # a row without sampled tokens
            found.append({**place, "branch": None, "mask": [], "logprobs": [], "spans": []})
            continue
        key = _key(place)
        matching = known[place["rollout_id"]].get(key, [])
        if len(matching) != counts[key]:  # several choices of a step have the same place, in their order
            raise ValueError(
                f"{_named(number, place)}: {len(matching)} rows of its rollout are at its place, {counts[key]} are given. Name "
                "the branch, or pass the options of the export"
            )
        found.append(matching[given[key]])
        given[key] += 1
    return found


def _place(row: Any) -> Mapping[str, Any]:
    return {"rollout_id": row} if isinstance(row, str) else row


def _listed(batch: Any) -> list[Mapping[str, Any]]:
    return [row for group in batch.claimed["groups"] for row in group["rows"]]


def _key(place: Mapping[str, Any]) -> _Key:
    """Return what a place has besides the rollout. `branch` of an entry of a claim is where a playback branches."""
    branch, steps = place.get("branch"), place.get("step_ids")
    name = place.get("rollout_id")
    return (name, branch) if isinstance(branch, int) else (name, None if steps is None else tuple(steps))


def _by_place(
    name: str, rows: Sequence[Mapping[str, Any]], claimed: Counter[_Key] | None
) -> dict[_Key, list[Mapping[str, Any]]]:
    """Return the rows of a rollout by their places, or its turns if the rows of a claim are turns.

    Without a claim, a step is the place of a row or of a turn, unless several choices of it make these different.
    """
    found: dict[_Key, list[Mapping[str, Any]]] = {(name, None): list(rows)}
    whole: dict[_Key, list[Mapping[str, Any]]] = {}
    turns: dict[_Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        found[name, row["branch"]] = [row]
        whole.setdefault((name, tuple(dict.fromkeys(span["step_id"] for span in _owned(row)))), []).append(row)
    for turn in sorted(_turns(rows), key=lambda turn: turn["spans"][0]["choice"]):
        turns.setdefault((name, (turn["spans"][0]["step_id"],)), []).append(turn)
    if claimed is None:
        unclear = {key for key in turns if key in whole and len(whole[key]) != len(turns[key])}
        return found | {key: at for key, at in (turns | whole).items() if key not in unclear}
    own = {key: count for key, count in claimed.items() if key[0] == name and key[1] != ()}
    return found | (whole if all(len(whole.get(key, ())) == count for key, count in own.items()) else turns)


def _owned(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [span for span in row["spans"] if span["owned"]]


def _turns(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the turns that rows train, each as a row with a `branch` that no other row has."""
    number = len(rows)
    for row in rows:
        for _, grouped in groupby(_owned(row), lambda span: (span["step_id"], span["choice"])):
            spans = list(grouped)
            start, end = spans[0]["start"], spans[-1]["end"]
            mask, logprobs = [0] * start + row["mask"][start:end], row["logprobs"][:end]
            yield {**row, "branch": number, "mask": mask, "logprobs": logprobs, "spans": spans}
            number += 1


def mismatch(
    rows: Sequence[Mapping[str, Any]], logprobs: Sequence[Any], *, policy_version: str | int, cut: bool = False
) -> dict[str, Any]:
    """Return the sums of a part of a batch, as `POST /batches/{id}/mismatch` takes them.

    `rows` are rows of format `sequences` as they were claimed. `logprobs` has for each row the trainer's logprobs of its
    trained tokens (mask 1), in their order, as numbers, an array or a tensor; NaN is a token that was not scored.
    `policy_version` is the version of the weights of the forward pass. With `cut`, a list may end early: the trainer cut the
    row. Raises ValueError, which names the row, for another number of logprobs, an infinite one, or a row without spans.
    """
    if len(rows) != len(logprobs):
        raise ValueError(f"{len(rows)} rows have {len(logprobs)} lists of logprobs")
    version, epoch = str(policy_version), _latest_epoch(rows)
    runs: list[_Run] = []
    recorded, given = [], []
    for number, (row, values) in enumerate(zip(rows, logprobs, strict=True)):
        old, new = _arrays(number, row, values, cut=cut)
        own = _runs(number, row, version, epoch)
        if sum(run.length for run in own) != len(old):
            raise ValueError(f"{_named(number, row)}: its spans do not have the tokens of its mask")
        runs += own
        recorded.append(old)
        given.append(new)
    old, new = (np.concatenate([np.zeros(0), *parts]) for parts in (recorded, given))
    return _sums(old, new, runs, np.array([len(part) for part in recorded], dtype=np.int64))


def _named(number: int, row: Mapping[str, Any]) -> str:
    return f"row {number} (rollout {row.get('rollout_id')!r}, branch {row.get('branch')!r})"


def _latest_epoch(rows: Iterable[Mapping[str, Any]]) -> int:
    spans = [span for row in rows for span in row.get("spans") or ()]
    return max((span.get("epoch") or 0 for span in spans), default=0)


def _arrays(number: int, row: Mapping[str, Any], values: Any, *, cut: bool) -> tuple[Floats, Floats]:
    """Return the recorded and the trainer's logprobs of a row's trained tokens; NaN where there is none."""
    name = _named(number, row)
    missing = [key for key in ("mask", "logprobs", "spans") if row.get(key) is None]
    if missing:
        raise ValueError(f"{name} has no {' and no '.join(missing)}; claim with format=sequences")
    trained = np.asarray(row["mask"], dtype=bool)
    recorded, given = np.asarray(row["logprobs"], dtype=np.float64), _numbers(name, values)
    if recorded.shape != trained.shape:
        raise ValueError(f"{name} has {len(recorded)} logprobs and a mask of {len(trained)}")
    count = int(trained.sum())
    if cut and given.ndim == 1 and len(given) < count:
        given = np.append(given, np.full(count - len(given), np.nan))
    if given.shape != (count,):
        raise ValueError(f"{name} has {count} trained tokens; logprobs of shape {given.shape} were given")
    if np.isinf(given).any():
        raise ValueError(f"{name}: logprob {int(np.argmax(np.isinf(given)))} of its trained tokens is infinite")
    return recorded[trained], given


def _numbers(name: str, values: Any) -> Floats:
    """Return the trainer's logprobs of a row, also of a tensor on any device. numpy has no bfloat16."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: its logprobs are not a list of numbers: {error}") from None


def _runs(number: int, row: Mapping[str, Any], version: str, epoch: int) -> list[_Run]:
    """Return the trained ranges of a row."""
    runs: list[_Run] = []
    last, begun, kind, has_context = None, 0, "start", False
    for span in row["spans"]:
        choice = (span["step_id"], span.get("choice"))
        if choice != last:
            kind = "continued" if runs else "forked" if has_context else "start"
            last, begun = choice, span["start"]
        has_context = has_context or not span["owned"]
        if not span["owned"]:
            continue
        start, end = int(span["start"]), int(span["end"])
        if not 0 <= begun <= start <= end <= len(row["mask"]):
            raise ValueError(f"{_named(number, row)}: a span is from {start} to {end}")
        is_processed = span.get("logprobs_mode") in _PROCESSED
        values = (
            _lag(span, version, epoch),
            _text(span.get("endpoint")),
            f"{_text(span.get('engine'))} {_text(span.get('logprobs_mode'))}",
            _text(span.get("temperature")),
            _truncation(span, is_processed=is_processed),
            kind,
            # Truncation is among what makes processed logprobs `constrained`; it has a rule of its own.
            "truncated" if span.get("logprobs_over") else _text(span.get("constrained")).lower(),
            _text(span.get("model")),
        )
        top_p = span.get("top_p")
        is_low = span.get("logprobs_over") == "truncated" and top_p is not None and 0 < top_p < 1
        only_p = is_low and not span.get("top_k") and not span.get("min_p")
        low = float(np.log(top_p)) if only_p else -LIMIT if span.get("logprobs_over") == "truncated" else None
        runs.append(_Run(start, end - start, start - begun, tuple(value[:MAX_LABEL] for value in values), low))
    return runs


def _text(value: Any) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:g}" if isinstance(value, float) else str(value)


def _lag(span: Mapping[str, Any], version: str, epoch: int) -> str:
    """Return how many versions before the reported one the token was sampled."""
    own = span.get("policy_version")
    if own is None or (span.get("epoch") or 0) != epoch:
        return _UNKNOWN
    if own == version:
        return "0"
    return str(int(version) - int(own)) if version.isdecimal() and str(own).isdecimal() else _UNKNOWN


def _truncation(span: Mapping[str, Any], *, is_processed: bool) -> str:
    given = " ".join(
        f"{name}={_text(span[name])}" for name in ("top_p", "top_k", "min_p") if span.get(name) is not None
    )
    if not given:
        return "none"
    over = span.get("logprobs_over") or "all"
    return f"{given} over {over}" if is_processed else f"{given} raw"


def _sums(old: Floats, new: Floats, runs: Sequence[_Run], lengths: Numbers) -> dict[str, Any]:
    """Return the sums of the tokens of all rows: recorded and given logprobs, with runs in their order."""
    counts = np.array([run.length for run in runs], dtype=np.int64)
    of_run = np.repeat(np.arange(len(runs)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    after = np.arange(len(old)) - starts  # the tokens of its run before each token
    constrained = _constrained(old, new, runs, of_run)
    forced = np.array([run.values[_OF_RUNS.index("constrained")] == "true" for run in runs], dtype=bool)[of_run]
    old = np.where(forced, np.nan, old)  # a forward pass gives other logprobs
    neighbours = _neighbours(old, new, of_run)
    rows = _sequences(old, new, lengths)
    scored = np.flatnonzero(~(np.isnan(old) | np.isnan(new)))
    old, new, of_run, after = old[scored], new[scored], of_run[scored], after[scored]
    d = np.clip(new - old, -LIMIT, LIMIT)
    tokens = _Tokens(old, d)
    begun = np.array([run.before for run in runs], dtype=np.int64)[of_run] + after
    position = np.array([run.start for run in runs], dtype=np.int64)[of_run] + after
    codes = {dimension: _codes([run.values[at] for run in runs], of_run) for at, dimension in enumerate(_OF_RUNS)}
    codes["place"] = (["first", "rest"], (begun >= FIRST).astype(np.int64))
    last = MAX_VALUES - 1
    thousands = [*(f"{number}000" for number in range(last)), f"{last}000+"]
    codes["position"] = (thousands, np.minimum(position // 1000, last))
    names, lags = codes["lag"]
    fresh = lags == names.index("0") if "0" in names else np.zeros(len(old), dtype=bool)
    names, numbers = codes.pop("endpoint")
    later = fresh & (begun >= FIRST)  # first tokens may have a fault that would hide that of an endpoint
    cells = {ALL: tokens.cells([ALL], np.zeros(len(old), dtype=np.int64))}
    cells["endpoint"] = tokens.only(later).cells(names, numbers[later])
    cells |= {dimension: tokens.cells(*coded) for dimension, coded in codes.items()}
    cells["constrained"] = constrained
    return {
        "cells": cells,
        "uncertain": np.bincount(tokens.logarithmic[old < -CERTAIN], minlength=HISTOGRAM).tolist(),
        "neighbours": neighbours,
        "slopes": _slopes(old, d, *codes["temperature"], fresh & (old > SLOPED[0]) & (old < SLOPED[1])),
        "support": _support(
            old, d, *codes["truncation"], np.array([np.nan if r.low is None else r.low for r in runs])[of_run]
        ),
        "sequences": rows,
    }


def _constrained(old: Floats, new: Floats, runs: Sequence[_Run], of_run: Numbers) -> dict[str, Any]:
    """Return the cells of `constrained`, which are the only ones with tokens of changed logprobs."""
    scored = np.flatnonzero(~(np.isnan(old) | np.isnan(new)))
    names, codes = _codes([run.values[_OF_RUNS.index("constrained")] for run in runs], of_run[scored])
    return _Tokens(old[scored], np.clip(new - old, -LIMIT, LIMIT)[scored]).cells(names, codes)


def _codes(values: Sequence[str], of_run: Numbers) -> tuple[list[str], Numbers]:
    """Return the most frequent values and OTHER, and the number of the value of each token."""
    names, numbers = np.unique(np.array([*values, ""], dtype=object).astype(str), return_inverse=True)
    counted = np.bincount(numbers[of_run], minlength=len(names))
    counted[names == OTHER] = -1  # a value of this name is counted with the rare ones
    most = np.argsort(-counted, kind="stable")[:MAX_VALUES]
    place = np.full(len(names), len(most))
    place[most] = np.arange(len(most))
    return [*names[most].tolist(), OTHER], place[numbers][of_run]


def _fixed(sums: Any) -> list[int]:
    """Return sums as integers in units of UNIT."""
    return [round(value) for value in (np.asarray(sums, dtype=np.float64) / UNIT).tolist()]


class _Tokens:
    """The tokens that were scored: recorded logprobs, differences, and the bins of both."""

    def __init__(self, old: Floats, d: Floats) -> None:
        self.old, self.d, self.size = old, d, np.abs(d)
        self.bins = np.searchsorted(np.array(EDGES), -old, side="left")
        with np.errstate(divide="ignore"):
            exponents = np.floor((np.log10(self.size) + 6) * 8)
        self.logarithmic = np.clip(exponents, 0, HISTOGRAM - 1).astype(np.int64)

    def only(self, kept: npt.NDArray[np.bool_]) -> "_Tokens":
        """Return these of the tokens."""
        return _Tokens(self.old[kept], self.d[kept])

    def cells(self, names: Sequence[str], codes: Numbers) -> dict[str, Any]:
        """Return a cell for each value that has tokens."""
        width = len(EDGES) + 1
        places, count = codes * width + self.bins, len(names)
        weights = (self.d, self.size, self.d**2, np.minimum(np.expm1(self.d) - self.d, LIMIT_K3))
        tokens = np.bincount(places, minlength=count * width).reshape(count, width)
        sums = [np.bincount(places, weight, count * width).reshape(count, width) for weight in weights]
        shapes = np.bincount(codes * HISTOGRAM + self.logarithmic, minlength=count * HISTOGRAM).reshape(
            count, HISTOGRAM
        )
        tails = np.bincount(codes, self.size > TAIL, count).astype(int).tolist()
        found = {}
        for number in np.flatnonzero(tokens.sum(axis=1)).tolist():
            bins = zip(tokens[number].tolist(), *(_fixed(each[number]) for each in sums), strict=True)
            cell = {"bins": [list(each) for each in bins], "histogram": shapes[number].tolist(), "tail": tails[number]}
            found[names[number]] = cell
        return found


def _neighbours(old: Floats, new: Floats, of_run: Numbers) -> list[int]:
    """Return pairs of adjacent tokens, and sums of |t - l of the next|, |t - l of the one before| and |t - l|."""
    with np.errstate(invalid="ignore"):
        ahead, behind, own = np.abs(new[:-1] - old[1:]), np.abs(new[1:] - old[:-1]), np.abs(new - old)
    kept = (of_run[:-1] == of_run[1:]) & ~np.isnan(ahead + behind + own[:-1] + own[1:])
    means = [ahead, behind, (own[:-1] + own[1:]) / 2]
    return [int(kept.sum()), *_fixed([np.minimum(each[kept], LIMIT).sum() for each in means])]


def _sequences(old: Floats, new: Floats, lengths: Numbers) -> list[int]:
    """Return the rows, and sums over rows of d of the row, its absolute value and its square: logs of sequence ratios."""
    d = np.nan_to_num(np.clip(new - old, -LIMIT, LIMIT))
    ratios = np.bincount(np.repeat(np.arange(len(lengths)), lengths), d, len(lengths))
    ratios = np.clip(ratios, -LIMIT_ROW, LIMIT_ROW)
    return [len(lengths), *_fixed([ratios.sum(), np.abs(ratios).sum(), (ratios**2).sum()])]


def _slopes(
    old: Floats, d: Floats, names: list[str], codes: Numbers, kept: npt.NDArray[np.bool_]
) -> dict[str, list[int]]:
    """Return for each temperature the tokens of a regression of d on l, and sums of l, d, l², ld and d²."""
    old, d, codes = old[kept], d[kept], codes[kept]
    counts = np.bincount(codes, minlength=len(names))
    sums = np.stack([np.bincount(codes, weight, len(names)) for weight in (old, d, old * old, old * d, d * d)], axis=1)
    return {names[at]: [int(counts[at]), *_fixed(sums[at])] for at in np.flatnonzero(counts).tolist()}


def _support(old: Floats, d: Floats, names: list[str], codes: Numbers, low: Floats) -> dict[str, list[int]]:
    """Return for each truncation with logprobs over unknown tokens: tokens, sums of d and d², tokens with l 0, and those of
    them with d between log top_p and 0."""
    kept = ~np.isnan(low)
    old, d, codes, low = old[kept], d[kept], codes[kept], low[kept]
    certain = old > -EDGES[0]
    inside = certain & (d <= _ALMOST) & (d >= low - _ALMOST)
    counts = [np.bincount(codes, weight, len(names)) for weight in (np.ones(len(old)), certain, inside)]
    sums = np.stack([np.bincount(codes, weight, len(names)) for weight in (d, d * d)], axis=1)
    return {
        names[at]: [int(counts[0][at]), *_fixed(sums[at]), int(counts[1][at]), int(counts[2][at])]
        for at in np.flatnonzero(counts[0]).tolist()
    }
