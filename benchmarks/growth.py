"""Measures all curves and the profile, or those named as arguments, and writes tables and plots."""

import sys
import tempfile
import time

from rich.console import Console

from benchmarks import curves, plots, profile, results
from benchmarks.continuation import continuation
from benchmarks.curves import Curve
from benchmarks.rows import Places
from benchmarks.servers import allow_many_sockets, started
from benchmarks.storing import memory

COMMAND = "make bench-growth"
PROFILE = "profile"
CURVES = {**curves.CURVES, "continuation": continuation, "memory": memory}


def main() -> None:
    """Measure what the command line names, by default everything."""
    allow_many_sockets()
    console = Console(width=150)
    selected = sys.argv[1:] or [*CURVES, PROFILE]
    unknown = set(selected) - {*CURVES, PROFILE}
    if unknown:
        raise SystemExit(f"unknown curve: {', '.join(sorted(unknown))}; known are {', '.join(CURVES)} and {PROFILE}")
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as upstream,
        started("bare", upstream.url) as bare,
        started("tokentape", upstream.url, f"embedded:{folder}/store") as tokentape,
    ):
        places = Places(upstream, bare, tokentape)
        for name in selected:
            started_at = time.monotonic()
            profile.keep(f"{COMMAND} CURVES={PROFILE}") if name == PROFILE else keep(CURVES[name](places))
            console.print(f"{name}: {time.monotonic() - started_at:.0f} s, in {results.FOLDER / name}.md")


def keep(curve: Curve) -> None:
    """Write a table and a plot of a curve."""
    columns = list(curve.points[0][1])
    rows = [[f"{x:,}", *(_number(values[name]) for name in columns)] for x, values in curve.points]
    panels = [
        (title, {name: [(x, values[name]) for x, values in curve.points] for name in names})
        for title, names in curve.panels.items()
    ]
    plots.lines(curve.name, panels, curve.x)
    picture = f"![{curve.title}]({curve.name}.svg)\n"
    command = f"{COMMAND} CURVES={curve.name}"
    results.write(curve.name, curve.title, command, f"{curve.how}\n", results.table([curve.x, *columns], rows), picture)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:.2f}"


if __name__ == "__main__":
    main()
