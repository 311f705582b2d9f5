"""Draw docs/images/metrics.png: the dashboard's main panels while the store and an engine are killed and restarted.

`python -m tests.system.monitoring.picture` runs the scene for a minute and a half and plots the panels' queries.
Run it by hand when the dashboard changes.
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from time import time
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from deploy.grafana.dashboard import dashboard

from . import environment
from .scene import ROOT, Scene, playing, without_variables

PICTURE = ROOT / "docs" / "images" / "metrics.png"
SHOWN = (
    "Calls by status", "Completion tokens by engine", "Overhead per call",
    "Steps by fidelity", "Fidelity problems by code", "Drift by kind",
    "Duration of store operations", "Steps in journals", "Endpoints, from each replica",
)  # fmt: skip
UNITS = {"s": "seconds", "reqps": "per second", "suffix: /s": "per second", "short": "", "none": ""}
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#999999",
)  # Okabe and Ito: distinguishable for color-blind readers
Event = tuple[float, str]


async def watch() -> tuple[dict[str, list[Any]], list[Event], float]:
    """Return the curves of the panels, the events and the start time."""
    folder = Path(tempfile.mkdtemp(prefix="tokentape-picture-"))
    async with playing(folder, environment.prometheus()) as scene:
        await asyncio.sleep(12)  # until rates have enough samples
        began, events = time(), []
        await asyncio.sleep(20)
        events.append((time() - began, "store killed"))
        await scene.store.end(signal.SIGKILL)
        await asyncio.sleep(12)
        events.append((time() - began, "store restarted"))
        await scene.store.start()
        await asyncio.sleep(18)
        events.append((time() - began, "engine two killed"))
        await scene.two.end(signal.SIGKILL)
        await asyncio.sleep(12)
        events.append((time() - began, "engine two restarted"))
        await scene.two.start()
        await asyncio.sleep(18)
        return {title: await curves(scene, title, began) for title in SHOWN}, events, began


async def curves(scene: Scene, title: str, began: float) -> list[tuple[str, list[float], list[float]]]:
    """Return the curves of a panel: legend, seconds, values. Rates cover ten seconds."""
    (panel,) = [panel for panel in dashboard()["panels"] if panel["title"] == title]
    found = []
    for target in panel["targets"]:
        expression = without_variables(target["expr"].replace("$__rate_interval", "10s"))
        params = {"query": expression, "start": str(began), "end": str(time()), "step": "1"}
        for series in (await scene.ask("query_range", **params))["result"]:
            legend = target["legendFormat"]
            for label, value in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", "the proxy" if label == "instance" else value)
            values = [(at - began, float(value)) for at, value in series["values"]]
            found.append((legend, [at for at, _ in values], [value for _, value in values]))
    return found


def draw(panels: dict[str, list[Any]], events: list[Event]) -> None:
    """Draw the panels and save the picture."""
    defaults = {
        panel["title"]: panel["fieldConfig"]["defaults"] for panel in dashboard()["panels"] if "fieldConfig" in panel
    }
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(3, 3, figsize=(13, 8), sharex=True)
    for axis, (title, curves_of_panel) in zip(axes.flat, panels.items(), strict=True):
        is_stacked = defaults[title]["custom"].get("stacking", {}).get("mode") == "normal"
        shown = sorted(
            (curve for curve in curves_of_panel if max(curve[2]) > 0 or not is_stacked),
            key=lambda curve: -max(curve[2]),
        )[:7]
        _curves(axis, shown, is_stacked=is_stacked)
        for at, _ in events:
            axis.axvline(at, color="#bbbbbb", linewidth=0.8, linestyle=":")
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_ylabel(UNITS[defaults[title]["unit"]])
        axis.legend(frameon=False, fontsize=6.5, loc="upper left", ncols=2 if len(shown) > 3 else 1)
        axis.set_xlim(0, 80)
        axis.set_ylim(0, axis.get_ylim()[1] * (1.7 if axis in axes[0] else 1.4))
    for axis in axes[0]:
        for at, event in events:
            axis.text(at + 0.5, axis.get_ylim()[1] * 0.98, event, rotation=90, va="top", fontsize=6.5, color="#555555")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=80)


def _curves(axis: plt.Axes, shown: list[Any], *, is_stacked: bool) -> None:
    """Draw lines, or stacked areas where the panel is stacked."""
    if not is_stacked:
        for colour, (legend, seconds, values) in zip(COLOURS, shown, strict=False):
            axis.plot(seconds, values, label=legend, color=colour, linewidth=1.3)
        return
    times = sorted({at for _, seconds, _ in shown for at in seconds})
    values_by_time = [dict(zip(seconds, values, strict=True)) for _, seconds, values in shown]
    areas = [[values.get(at, 0.0) for at in times] for values in values_by_time]
    axis.stackplot(times, areas, labels=[legend for legend, *_ in shown], colors=COLOURS, alpha=0.75, linewidth=0)


if __name__ == "__main__":
    seen, happened, _ = asyncio.run(watch())
    draw(seen, happened)
    sys.stdout.write(f"wrote {PICTURE.relative_to(ROOT)}\n")
