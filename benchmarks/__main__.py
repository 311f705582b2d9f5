"""Measures the targets, or the rows named as arguments, and prints a table; that of all rows is written to `results/`.

`--against PATH` measures another checkout in the same rounds, for figures that do not depend on the machine's load.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import plots, results
from benchmarks.rows import ROWS, Places, Row
from benchmarks.servers import allow_many_sockets, started

_HEADER = ("what", "target", "measured", "CPU of a call, µs", "")
_HOW = (
    "Medians of alternating rounds with the bare proxy in the same run; all processes on this machine. CPU: TokenTape's "
    "processes + its store (bare).\n"
)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], help="by default all", metavar="ROW")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout to compare with")
    options = parser.parse_args()
    allow_many_sockets()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        upstream = stack.enter_context(started("upstream"))
        bare = stack.enter_context(started("bare", upstream.url))
        ours, old = (
            stack.enter_context(started("tokentape", upstream.url, f"embedded:{folder}/{name}", checkout=checkout))
            if name == "ours" or checkout
            else None
            for name, checkout in (("ours", None), ("old", options.against))
        )
        places = Places(upstream, bare, ours, old)
        measured = [row for name in options.rows or ROWS for row in ROWS[name](places)]
    _print(measured)
    if not options.rows and not options.against:
        _keep(measured)


def _lines(measured: list[Row]) -> list[tuple[str, ...]]:
    return [(row.what, row.target, row.measured, row.cpu, "met" if row.is_met else "NOT MET") for row in measured]


def _print(measured: list[Row]) -> None:
    compared = any(row.old for row in measured)
    shown = Table(*_HEADER, *(["x the other checkout"] if compared else []))
    for line, row in zip(_lines(measured), measured, strict=True):
        shown.add_row(*line, *([row.old] if compared else []))
    Console(width=180).print(f"{results.machine()}; {_HOW}", shown)


def _keep(measured: list[Row]) -> None:
    """Write the table, and plot how much of each target is reached."""
    plots.bars("targets", "share of the target", {row.what: row.reached for row in measured}, mark=1)
    picture = "![share of each target](targets.svg)\n"
    path = results.write("latest", "Targets", "make bench", _HOW, results.table(_HEADER, _lines(measured)), picture)
    Console().print(f"wrote {path}")


if __name__ == "__main__":
    main()
