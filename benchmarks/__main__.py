"""Measures all targets, prints the table and writes it to `benchmarks/results/`."""

import tempfile

from rich.console import Console
from rich.table import Table

from benchmarks import plots, results
from benchmarks.rows import Places, Row, rows
from benchmarks.servers import allow_many_sockets, started

_HEADER = ("what", "target", "measured", "")
_HOW = "Medians of alternating rounds with the bare proxy in the same run; all processes on this machine.\n"


def main() -> None:
    """Measure all targets."""
    allow_many_sockets()
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as upstream,
        started("bare", upstream.url) as bare,
        started("tokentape", upstream.url, f"embedded:{folder}/store") as tokentape,
    ):
        measured = [row for measure in rows(Places(upstream, bare, tokentape)) for row in measure()]
    _keep(measured)


def _keep(measured: list[Row]) -> None:
    """Print the table, write it, and plot how much of each target is reached."""
    lines = [(row.what, row.target, row.measured, "met" if row.is_met else "NOT MET") for row in measured]
    shown = Table(*_HEADER)
    for line in lines:
        shown.add_row(*line)
    console = Console(width=150)
    console.print(f"{results.machine()}; {_HOW}", shown)
    plots.bars("targets", "share of the target", {row.what: row.reached for row in measured}, mark=1)
    picture = "![share of each target](targets.svg)\n"
    path = results.write("latest", "Targets", "make bench", _HOW, results.table(_HEADER, lines), picture)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
