"""Plots of exported rows: logprobs, rewards, numbers of tokens.

Shows how to read exported rows: `mask` marks the sampled tokens, and `spans` have their steps and policy versions. The rows
come from a running proxy, or from an exported file (Parquet or NDJSON, format `sequences`).
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from tokentape import Client

mpl.use("Agg")  # writes files without a display

from matplotlib import pyplot as plt  # after the selection of the backend
from matplotlib.axes import Axes

Row = Mapping[str, Any]
INK, SOFT, WARM = "#0b5fa5", "#9ecae9", "#d95f02"  # distinguishable with colour vision deficiency


def rows_of(url: str | None, file: Path | None) -> Iterator[Row]:
    """Yield rows of the format `sequences`, from a proxy or a file."""
    if file is None:
        with Client(url or "") as client:
            yield from client.export(format="sequences")
    elif file.suffix == ".parquet":
        from pyarrow import parquet  # noqa: PLC0415 - for Parquet files only

        yield from parquet.read_table(file).to_pylist()
    else:
        yield from map(json.loads, file.read_text().splitlines())


class Seen:
    """The plotted values, collected row by row."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = 0
        self.logprobs: list[float] = []
        self.places: list[int] = []  # position of each token in its turn
        self.turns: defaultdict[int, list[int]] = defaultdict(list)  # lengths, by the index of the turn
        self.rewards: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        self.rows += 1
        # A span that several branches share is trained by the one that owns it, and is counted there.
        spans = [span for span in row["spans"] if span["owned"]]
        for turn, span in enumerate(spans):
            logprobs = row["logprobs"][span["start"] : span["end"]]
            self.turns[turn].append(len(logprobs))
            known = [(place, logprob) for place, logprob in enumerate(logprobs) if logprob is not None]
            self.places += [place for place, _ in known]
            self.logprobs += [logprob for _, logprob in known]
        if row["reward"] is not None and spans:
            # The oldest of several policy versions determines how stale the row is.
            self.rewards[spans[0]["policy_version"] or "none"][row["group_id"] or row["rollout_id"]].append(
                row["reward"]
            )


def plot_histogram(axes: Axes, seen: Seen) -> None:
    """Plot the distribution of logprobs."""
    axes.hist(seen.logprobs, bins=60, color=INK)
    mean = float(np.mean(seen.logprobs))
    axes.axvline(mean, color=WARM, label=f"mean {mean:.2f}")
    axes.set(title="Logprobs of sampled tokens", xlabel="logprob", ylabel="tokens")
    axes.legend(frameon=False, loc="upper left")


def plot_places(axes: Axes, seen: Seen) -> None:
    """Plot median and quartiles of the logprobs by position in the turn."""
    places, logprobs = np.array(seen.places), np.array(seen.logprobs)
    known = [place for place in range(places.max() + 1) if (places == place).sum() >= 5]
    low, middle, high = np.array([np.percentile(logprobs[places == place], [25, 50, 75]) for place in known]).T
    axes.fill_between(known, low, high, color=SOFT, label="middle half")
    axes.plot(known, middle, color=INK, label="median")
    axes.set(title="Logprob by position in the turn", xlabel="position", ylabel="logprob")
    axes.set_ylim(1.3 * low.min(), 0.98 * high.max())
    axes.legend(frameon=False, loc="lower right", ncols=2)


def plot_rewards(axes: Axes, seen: Seen) -> None:
    """Plot mean and range of each group's rewards by policy version, and the mean of each version."""
    versions = sorted(
        seen.rewards, key=lambda version: (not version.isdigit(), int(version) if version.isdigit() else 0)
    )
    for place, version in enumerate(versions):
        groups = [np.array(group) for group in seen.rewards[version].values()]
        across = place + np.linspace(-0.3, 0.3, len(groups) + 2)[1:-1]
        spread = np.abs([[g.mean() - g.min(), g.max() - g.mean()] for g in groups]).T  # rounding can make a 0 negative
        axes.errorbar(across, [g.mean() for g in groups], yerr=spread, fmt=".", color=SOFT, elinewidth=1)
    means = [np.mean(np.concatenate(list(seen.rewards[version].values()))) for version in versions]
    axes.plot(means, "o-", ms=3, color=WARM, label="mean", zorder=3)
    step = max(1, len(versions) // 8)
    axes.set_xticks(range(0, len(versions), step), versions[::step])
    axes.set(title="Rewards of groups: mean and range", xlabel="policy version", ylabel="reward")
    axes.legend(frameon=False, loc="lower right")


def plot_turns(axes: Axes, seen: Seen) -> None:
    """Plot the numbers of sampled tokens of the first, second, ... step of a sequence."""
    turns = sorted(seen.turns)[:6]
    shades = plt.get_cmap("viridis")(np.linspace(0.15, 0.85, len(turns)))
    longest = max(max(seen.turns[turn]) for turn in turns)
    bins = np.linspace(0.5, longest + 0.5, min(longest, 40) + 1)
    names = [f"step {turn + 1}" for turn in turns]
    axes.hist([seen.turns[turn] for turn in turns], bins, stacked=True, color=list(shades), label=names)  # type: ignore[arg-type]
    axes.set(title="Sampled tokens per step", xlabel="tokens", ylabel="steps")
    axes.legend(frameon=False, loc="upper left")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the plots into one image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    source.add_argument("--file", type=Path, help="file of exported rows: .parquet or .ndjson")
    parser.add_argument("--out", type=Path, default=Path("plots.png"), help="image file (default: %(default)s)")
    parser.add_argument("--rewards", action="store_true", help="plot the rewards only")
    options = parser.parse_args(arguments)
    seen = Seen(rows_of(options.url, options.file))
    if not seen.logprobs:
        parser.exit(1, "There is nothing to plot: no exported row has sampled tokens with logprobs.\n")
    plots = (plot_histogram, plot_places, plot_rewards, plot_turns) if not options.rewards else (plot_rewards,)
    rows, columns, height = (1, 1, 4) if options.rewards else (2, 2, 7)
    figure, axes = plt.subplots(rows, columns, figsize=(10, height), layout="constrained", squeeze=False)
    for plot, place in zip(plots, axes.flat, strict=True):
        plot(place, seen)
        place.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out, dpi=100)
    plt.close(figure)
    print(f"{options.out}: {seen.rows} rows, {len(seen.logprobs)} sampled tokens, {len(seen.rewards)} policy versions")


if __name__ == "__main__":
    main()
