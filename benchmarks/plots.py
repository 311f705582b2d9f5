"""Plots of results as SVG files, by default in `benchmarks/results/`; equal results give equal bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")  # before pyplot is imported; no display is required
mpl.rcParams |= {
    "svg.hashsalt": "tokentape",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.results import FOLDER  # noqa: E402

Series = Mapping[str, Sequence[tuple[float, float]]]


def lines(name: str, panels: Sequence[tuple[str, Series]], x: str) -> None:
    """Plot panels side by side, each with lines over the same quantity."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.1), squeeze=False)
    for at, (title, series) in zip(axes[0], panels, strict=True):
        for label, points in series.items():
            at.plot([point[0] for point in points], [point[1] for point in points], marker="o", label=label)
        _dress(at, title, x, sorted({point[0] for points in series.values() for point in points}))
    _save(figure, name)


def _dress(at: Axes, title: str, x: str, places: Sequence[float]) -> None:
    at.set_title(title)
    at.set_xlabel(x)
    at.set_xscale("log")
    at.set_xticks(places, [f"{place:,.0f}" for place in places])
    at.minorticks_off()
    at.set_ylim(bottom=0)
    at.grid(axis="y", alpha=0.3)
    at.legend(frameon=False, loc="upper right")


def bars(name: str, title: str, values: Mapping[str, float], *, mark: float | None = None, unit: str = "") -> None:
    """Plot one bar per value, the first one on top; `mark` draws a vertical line."""
    figure, at = plt.subplots(figsize=(9, 0.4 * len(values) + 1))
    labels = list(reversed(values))
    drawn = at.barh(labels, [values[label] for label in labels], height=0.6)
    at.bar_label(drawn, fmt=f"%.2f{unit}", padding=3)
    if mark is not None:
        at.axvline(mark, color="black", linewidth=1)
    at.set_title(title)
    _save(figure, name)


def scattered(path: Path, series: Series, x: str, y: str, *, is_line: bool = False) -> None:
    """Plot points, or lines, of one or several series."""
    figure, at = plt.subplots(figsize=(4.2, 2.2))
    for label, points in series.items():
        style = {"marker": "o", "markersize": 4} if is_line else {"marker": ".", "markersize": 3, "linestyle": "none"}
        at.plot([point[0] for point in points], [point[1] for point in points], label=label, **style)
    at.set(xlabel=x, ylabel=y)
    at.grid(alpha=0.3)
    if len(series) > 1:
        at.legend(frameon=False, loc="upper right")
    _save(figure, path.stem, path.parent)


def _save(figure: Figure, name: str, folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
