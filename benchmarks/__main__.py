"""Run every line of the table and print it."""

import tempfile

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Places, machine, rows
from benchmarks.servers import allow_many_sockets, started


def main() -> None:
    """The table of performance targets, with the bare proxy in the same run."""
    allow_many_sockets()
    console = Console(width=150)
    console.print(f"{machine()}; medians of rounds in turn; everything on this machine at once")
    table = Table("what", "target", "measured", "")
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as upstream,
        started("bare", upstream.url) as bare,
        started("tokentape", upstream.url, f"embedded:{folder}/store") as tokentape,
    ):
        for measure in rows(Places(upstream, bare, tokentape)):
            for row in measure():
                table.add_row(row.what, row.target, row.measured, "met" if row.is_met else "NOT MET")
    console.print(table)


if __name__ == "__main__":
    main()
