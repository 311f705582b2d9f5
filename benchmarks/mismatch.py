"""Brings each cause of a mismatch about in simulated batches, and counts the verdicts: the table of docs/mismatch.md.

A batch has two endpoints; tasks of the second are less certain, and so are the first tokens of replies. Engine and trainer
compute the same logits, each with noise as of bfloat16, except for the cause. With --plots it draws each verdict instead, as
docs/images/mismatch-VERDICT.svg.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proxy.config.sections import MismatchSettings
from proxy.rollouts.mismatch import Rules, verdicts_of
from tokentape.mismatch_sums import EDGES, TAIL, UNIT, mismatch

SEEDS: Final = 20
ROWS: Final = 16
TURNS: Final = 6
TURN: Final = 32  # tokens, after as many of context
FIRST: Final = 8
VOCABULARY: Final = 100
NOISE: Final = 0.015  # of logits
VERSION: Final = "7"
RULES: Final = Rules(**dict(MismatchSettings()))

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Batch:
    """The settings of a simulated batch, and its logits: tokens, vocabulary."""

    random: np.random.Generator
    noise: float = NOISE
    temperature: float = 1.0  # of the sampling
    engine_divides: bool = True
    trainer_divides: bool = True
    top_p: float | None = None
    engine_only: Floats | float = 0.0  # added to the engine's logits
    versions: tuple[str, ...] = (VERSION,)  # of rows, in turn
    shift: int = 0  # of the trainer's logprobs in a row
    ids_off_by: int = 0
    certainty: float = 1.0  # a factor of the logits

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return ROWS * TURNS * TURN

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each token."""
        return np.arange(self.tokens) // (TURNS * TURN)

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """Which tokens are the first ones of a turn."""
        return np.arange(self.tokens) % TURN < FIRST

    def changed(self, size: float, where: npt.NDArray[np.bool_]) -> Floats:
        """Return changes of the logits of some tokens."""
        return np.asarray(self.random.normal(0, size, (self.tokens, VOCABULARY)) * where[:, None])


def log_softmax(logits: Floats) -> Floats:
    """Return the logprobs of logits."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


def kept_by_top_p(logprobs: Floats, top_p: float) -> Floats:
    """Return the logprobs over the most likely tokens of together `top_p`, minus infinity for others."""
    order = np.argsort(-logprobs, axis=-1)
    ordered = np.take_along_axis(np.exp(logprobs), order, axis=-1)
    before = np.cumsum(ordered, axis=-1) - ordered
    kept = np.zeros(logprobs.shape, dtype=bool)
    np.put_along_axis(kept, order, before < top_p, axis=-1)
    cut = np.where(kept, logprobs, -np.inf)
    return np.asarray(cut - np.log(np.exp(cut).sum(axis=-1, keepdims=True)))


def simulated(batch: Batch) -> tuple[list[dict[str, Any]], list[Floats]]:
    """Return the rows of a batch as they are claimed, and the trainer's logprobs."""
    scale = batch.certainty * np.where(batch.rows % 2 == 0, 6.0, 3.5) * np.where(batch.is_first, 0.6, 1.0)
    scale = scale * batch.random.uniform(0.4, 1.6, batch.tokens)
    logits = batch.random.normal(0, 1, (batch.tokens, VOCABULARY)) * scale[:, None]
    engine = logits + batch.random.normal(0, batch.noise, logits.shape) + batch.engine_only
    trainer = logits + batch.random.normal(0, batch.noise, logits.shape)
    sampled_from = log_softmax(engine / batch.temperature)
    recorded = sampled_from if batch.engine_divides else log_softmax(engine)
    if batch.top_p is not None:
        sampled_from = recorded = kept_by_top_p(sampled_from, batch.top_p)
    ids = np.argmax(sampled_from + batch.random.gumbel(size=logits.shape), axis=-1)
    scored = log_softmax(trainer / batch.temperature if batch.trainer_divides else trainer)
    at = np.arange(batch.tokens)
    given = scored[at, (ids + batch.ids_off_by) % VOCABULARY].reshape(ROWS, -1)
    old = recorded[at, ids].astype(np.float32).reshape(ROWS, -1)
    rows = [_row(batch, number, old[number]) for number in range(ROWS)]
    return rows, list(np.roll(given, batch.shift, axis=1))


def _row(batch: Batch, number: int, recorded: Any) -> dict[str, Any]:
    length = 2 * TURN * TURNS
    mask = np.arange(length) % (2 * TURN) >= TURN
    logprobs = np.full(length, np.nan)
    logprobs[mask] = recorded
    spans = [
        {
            "start": (2 * turn + 1) * TURN,
            "end": (2 * turn + 2) * TURN,
            "step_id": f"s{turn}",
            "choice": 0,
            "policy_version": batch.versions[number % len(batch.versions)],
            "temperature": batch.temperature,
            "owned": True,
            "constrained": batch.top_p is not None,
            "endpoint": f"engine-{number % 2}",
            "engine": "vllm",
            "model": "policy",
            "logprobs_mode": "processed_logprobs" if batch.engine_divides else "raw_logprobs",
            **({} if batch.top_p is None else {"top_p": batch.top_p, "logprobs_over": "truncated"}),
        }
        for turn in range(TURNS)
    ]
    return {"rollout_id": f"r{number}", "branch": 0, "mask": mask, "logprobs": logprobs, "spans": spans}


def exact(batch: Batch) -> None:
    """Compute both sides in float32."""
    batch.noise = 1e-5


def warm(batch: Batch) -> None:
    """Divide on both sides."""
    batch.temperature = 0.7


def shifted(batch: Batch) -> None:
    """Move the trainer's rows by one token."""
    batch.shift = -1


def other_tokens(batch: Batch) -> None:
    """Score the next id of the vocabulary."""
    batch.ids_off_by = 1


def other_tokens_of_all(batch: Batch) -> None:
    """Score the next id, of a policy that is never certain."""
    batch.certainty, batch.ids_off_by = 0.4, 1


def truncated_support(batch: Batch) -> None:
    """Renormalize over the kept tokens on the engine's side only."""
    batch.top_p = 0.9


def raw_engine(batch: Batch) -> None:
    """Divide on the trainer's side only."""
    batch.temperature, batch.engine_divides = 0.7, False


def raw_trainer(batch: Batch) -> None:
    """Divide on the engine's side only."""
    batch.temperature, batch.trainer_divides = 0.7, False


def stale_endpoint(batch: Batch) -> None:
    """Sample at one endpoint with weights that are three small updates old."""
    batch.engine_only = batch.changed(0.05 * 3**0.5, batch.rows % 2 == 1)


def boundaries(batch: Batch) -> None:
    """Compute the first tokens of replies over other positions."""
    batch.engine_only = batch.changed(0.3, batch.is_first)


def restarted(batch: Batch) -> None:
    """Compute replies that follow others in their row over other positions."""
    batch.engine_only = batch.changed(1.0, np.arange(batch.tokens) % (TURNS * TURN) >= TURN)


def heavy_tail(batch: Batch) -> None:
    """Route one token of a hundred to other experts."""
    batch.engine_only = batch.changed(2.0, batch.random.random(batch.tokens) < 0.01)


def lag(batch: Batch) -> None:
    """Sample three of four rows with older weights."""
    batch.versions = ("7", "6", "5", "4")
    for number in range(1, 4):
        batch.engine_only = batch.engine_only + batch.changed(0.06, batch.rows % 4 >= number)


def unexplained(batch: Batch) -> None:
    """Sample everything with other weights of the same version."""
    batch.engine_only = batch.changed(0.3, np.ones(batch.tokens, dtype=bool))


def stale_and_boundaries(batch: Batch) -> None:
    """Bring two causes about."""
    stale_endpoint(batch)
    batch.engine_only = batch.engine_only + batch.changed(0.3, batch.is_first)


CAUSES: Final[dict[str, tuple[Callable[[Batch], None], set[str]]]] = {
    "float32 on both sides": (exact, {"numeric"}),
    "bfloat16": (lambda _: None, {"numeric"}),
    "bfloat16, temperature 0.7 on both sides": (warm, {"numeric"}),
    "rows shifted by one": (shifted, {"shifted"}),
    "ids off by one": (other_tokens, {"other_tokens"}),
    "ids off by one, a policy that is never certain": (other_tokens_of_all, {"other_tokens"}),
    "top-p 0.9, logprobs over the kept tokens": (truncated_support, {"truncated_support"}),
    "temperature 0.7, engine raw": (raw_engine, {"temperature"}),
    "temperature 0.7, trainer raw": (raw_trainer, {"temperature"}),
    "one endpoint with older weights": (stale_endpoint, {"stale_endpoint"}),
    "first tokens over other positions": (boundaries, {"boundaries"}),
    "later replies over other positions": (restarted, {"boundaries"}),
    "experts routed otherwise": (heavy_tail, {"heavy_tail"}),
    "rows of older versions": (lag, {"lag"}),
    "other weights of the same version": (unexplained, {"unexplained"}),
    "older weights at one endpoint, and first tokens": (stale_and_boundaries, {"stale_endpoint", "boundaries"}),
}


def verdicts(cause: str, seed: int) -> set[str]:
    """Return the verdicts of one simulated batch."""
    batch = Batch(np.random.default_rng(seed))
    CAUSES[cause][0](batch)
    rows, logprobs = simulated(batch)
    return {each.verdict for each in verdicts_of(mismatch(rows, logprobs, policy_version=VERSION), RULES)}


def table(seeds: int = SEEDS) -> str:
    """Return the confusion matrix as a table: for each cause, how often each verdict was given."""
    lines = ["| cause | tokens | verdicts |", "|---|---|---|"]
    for cause in CAUSES:
        counted = Counter(verdict for seed in range(seeds) for verdict in verdicts(cause, seed))
        shown = ", ".join(f"`{verdict}` {count}" for verdict, count in sorted(counted.items()))
        lines.append(f"| {cause} | {ROWS * TURNS * TURN:,} | {shown} |")
    return "\n".join(lines)


# Verdicts with the cause that is drawn: as the differences of tokens, or as their mean sizes in the cells of a dimension.
PICTURES: Final[dict[str, tuple[str, str | None]]] = {
    "shifted": ("rows shifted by one", None),
    "other_tokens": ("ids off by one", None),
    "truncated_support": ("top-p 0.9, logprobs over the kept tokens", None),
    "temperature": ("temperature 0.7, engine raw", None),
    "stale_endpoint": ("one endpoint with older weights", "endpoint"),
    "boundaries": ("first tokens over other positions", "place"),
    "heavy_tail": ("experts routed otherwise", None),
    "lag": ("rows of older versions", "lag"),
    "numeric": ("bfloat16", None),
    "unexplained": ("other weights of the same version", None),
}
SHOWN: Final = 250  # tokens, and those of a tail if they are few
ENOUGH: Final = 30  # tokens of a bin
RECORDED: Final = "recorded logprob"


def draw(folder: Path) -> None:
    """Draw each verdict."""
    from benchmarks.plots import scattered

    for verdict, (cause, dimension) in PICTURES.items():
        batch = Batch(np.random.default_rng(1))
        CAUSES[cause][0](batch)
        rows, logprobs = simulated(batch)
        path = folder / f"mismatch-{verdict}.svg"
        if dimension is None:
            old = np.concatenate([row["logprobs"][row["mask"]] for row in rows])
            points = np.stack([old, np.concatenate(logprobs) - old], axis=1)
            shown = batch.random.choice(points, SHOWN, replace=False)
            if len(tail := points[np.abs(points[:, 1]) > TAIL]) < SHOWN // 4:
                shown = np.concatenate([shown, tail])
            scattered(path, {"": shown.round(4).tolist()}, RECORDED, "d of a token")
        else:
            cells = mismatch(rows, logprobs, policy_version=VERSION)["cells"][dimension]
            series = {f"{dimension} {value}": _means(cell) for value, cell in sorted(cells.items())}
            scattered(path, series, RECORDED, "mean |d|", is_line=True)


def _means(cell: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the mean |d| of each bin of l that has enough tokens, at the middle of the bin."""
    middles = -(np.array([0.0, *EDGES]) + np.array([*EDGES, 16.0])) / 2
    bins = zip(middles.tolist(), cell["bins"], strict=True)
    return [(middle, size * UNIT / count) for middle, (count, _, size, *_) in bins if count >= ENOUGH]


def main() -> None:
    """Print the table, or draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description=__doc__)
    parser.add_argument("--plots", action="store_true", help="draw each verdict instead")
    if parser.parse_args().plots:
        draw(Path(__file__).parent.parent / "docs" / "images")
    else:
        print(table())


if __name__ == "__main__":
    main()
