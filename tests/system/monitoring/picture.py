"""docs/images/metrics.png: the dashboard's main panels, asked of a Prometheus while things go wrong and right again.

`python -m tests.system.monitoring.picture` runs the scene for a minute and a half and draws what the panels' own queries
answer. It is a picture for people, made by hand when the dashboard changes; nothing is judged by it.
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
    "Calls by status", "Sampled tokens by engine", "Added to a call",
    "Steps by fidelity", "Problems by code", "Drift",
    "Time of a verb", "Steps in journals", "Endpoints, from each replica",
)  # fmt: skip
WORDS = {"s": "seconds", "reqps": "a second", "suffix: /s": "a second", "short": "", "none": ""}
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#999999",
)  # Okabe and Ito's, for every eye
Event = tuple[float, str]


async def watch() -> tuple[dict[str, list[Any]], list[Event], float]:
    """What the panels showed, what happened when, and the beginning."""
    folder = Path(tempfile.mkdtemp(prefix="tokentape-picture-"))
    async with playing(folder, environment.prometheus()) as scene:
        await asyncio.sleep(12)  # until rates have something to look back at
        began, events = time(), []
        await asyncio.sleep(20)
        events.append((time() - began, "store killed"))
        await scene.store.end(signal.SIGKILL)
        await asyncio.sleep(12)
        events.append((time() - began, "store back"))
        await scene.store.start()
        await asyncio.sleep(18)
        events.append((time() - began, "engine two killed"))
        await scene.two.end(signal.SIGKILL)
        await asyncio.sleep(12)
        events.append((time() - began, "and back"))
        await scene.two.start()
        await asyncio.sleep(18)
        return {title: await curves(scene, title, began) for title in SHOWN}, events, began


async def curves(scene: Scene, title: str, began: float) -> list[tuple[str, list[float], list[float]]]:
    """The curves of a panel: legend, seconds, values. Rates look ten seconds back."""
    (panel,) = [one for one in dashboard()["panels"] if one["title"] == title]
    found = []
    for target in panel["targets"]:
        expression = without_variables(target["expr"].replace("$__rate_interval", "10s"))
        said = {"query": expression, "start": str(began), "end": str(time()), "step": "1"}
        for one in (await scene.ask("query_range", **said))["result"]:
            legend = target["legendFormat"]
            for label, value in one["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", "the proxy" if label == "instance" else value)
            values = [(at - began, float(value)) for at, value in one["values"]]
            found.append((legend, [at for at, _ in values], [value for _, value in values]))
    return found


def draw(panels: dict[str, list[Any]], events: list[Event]) -> None:
    """The picture."""
    made = {one["title"]: one["fieldConfig"]["defaults"] for one in dashboard()["panels"] if "fieldConfig" in one}
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(3, 3, figsize=(13, 8), sharex=True)
    for axis, (title, told) in zip(axes.flat, panels.items(), strict=True):
        is_stacked = made[title]["custom"].get("stacking", {}).get("mode") == "normal"
        shown = sorted((one for one in told if max(one[2]) > 0 or not is_stacked), key=lambda curve: -max(curve[2]))[:7]
        _curves(axis, shown, is_stacked=is_stacked)
        for at, _ in events:
            axis.axvline(at, color="#bbbbbb", linewidth=0.8, linestyle=":")
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_ylabel(WORDS[made[title]["unit"]])
        axis.legend(frameon=False, fontsize=6.5, loc="upper left", ncols=2 if len(shown) > 3 else 1)
        axis.set_xlim(0, 80)
        axis.set_ylim(0, axis.get_ylim()[1] * (1.7 if axis in axes[0] else 1.4))
    for axis in axes[0]:
        for at, words in events:
            axis.text(at + 0.5, axis.get_ylim()[1] * 0.98, words, rotation=90, va="top", fontsize=6.5, color="#555555")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=80)


def _curves(axis: plt.Axes, shown: list[Any], *, is_stacked: bool) -> None:
    """Lines, or areas that lie on each other, as the panel has them."""
    if not is_stacked:
        for colour, (legend, seconds, values) in zip(COLOURS, shown, strict=False):
            axis.plot(seconds, values, label=legend, color=colour, linewidth=1.3)
        return
    times = sorted({at for _, seconds, _ in shown for at in seconds})
    told = [dict(zip(seconds, values, strict=True)) for _, seconds, values in shown]
    areas = [[one.get(at, 0.0) for at in times] for one in told]
    axis.stackplot(times, areas, labels=[legend for legend, *_ in shown], colors=COLOURS, alpha=0.75, linewidth=0)


if __name__ == "__main__":
    seen, happened, _ = asyncio.run(watch())
    draw(seen, happened)
    sys.stdout.write(f"wrote {PICTURE.relative_to(ROOT)}\n")
