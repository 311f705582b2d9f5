"""Measures all curves and the costs by stage, or those named as arguments, and writes tables and plots."""

import asyncio
import sys
import tempfile
import time

from rich.console import Console

from benchmarks import curves, load, plots, results
from benchmarks.continuation import continuation
from benchmarks.curves import Curve
from benchmarks.rows import Places
from benchmarks.servers import Server, allow_many_sockets, started
from benchmarks.stages import costs
from benchmarks.storing import memory
from benchmarks.upstream import SAMPLED_TOKENS

COMMAND = "make bench-growth"
COSTS = "costs"
CURVES = {**curves.CURVES, "continuation": continuation, "memory": memory}


def main() -> None:
    """Measure what the command line names, by default everything."""
    allow_many_sockets()
    console = Console(width=150)
    selected = sys.argv[1:] or [*CURVES, COSTS]
    unknown = set(selected) - {*CURVES, COSTS}
    if unknown:
        raise SystemExit(f"unknown curve: {', '.join(sorted(unknown))}; known are {', '.join(CURVES)} and {COSTS}")
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as upstream,
        started("bare", upstream.url) as bare,
        started("tokentape", upstream.url, f"embedded:{folder}/store") as tokentape,
    ):
        places = Places(upstream, bare, tokentape)
        for name in selected:
            started_at = time.monotonic()
            keep_costs(places) if name == COSTS else keep(CURVES[name](places))
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


def keep_costs(places: Places) -> None:
    """Measure and write the cost of a call by stage, and the CPU time of whole server processes."""
    tables = []
    for mode, streamed in (("stream", True), ("whole", False)):
        found = costs(streamed=streamed)
        what = "a streamed call" if streamed else "an unstreamed call"
        stages = {**found.stages, "rest of the core": found.rest}
        wholes = {
            "**whole core**": found.whole,
            "server process, bare": _processor_us(places.bare, mode),
            "server process, TokenTape (without its store)": _processor_us(places.tokentape, mode),
        }
        rows = [
            [stage, f"{cost:.0f}", f"{cost / SAMPLED_TOKENS:.2f}", f"{cost / found.whole:.2f}"]
            for stage, cost in (stages | wholes).items()
        ]
        plots.bars(
            f"costs-{mode}", f"share of the cost of the core, {what}", {k: v / found.whole for k, v in stages.items()}
        )
        tables.append(f"## {what.capitalize()}, µs\n")
        tables.append(results.table(["stage", "per call", "per sampled token", "x core"], rows))
        tables.append(f"![{what}](costs-{mode}.svg)\n")
    how = (
        "CPU time (minimum of rounds) of a call with 1,000 + 200 tokens in vLLM's format; if streamed, one event per token. "
        "The core runs without sockets or store; the server processes serve 16 clients.\n"
    )
    results.write(COSTS, "Cost of a call by stage", f"{COMMAND} CURVES={COSTS}", how, *tables)


def _processor_us(server: Server, mode: str, calls: int = 640) -> float:
    """Return the CPU time of a server process per call in µs, with 16 clients."""
    asyncio.run(load.throughput(server.port, mode, clients=16, calls=64))
    before = server.processor_s()
    asyncio.run(load.throughput(server.port, mode, clients=16, calls=calls))
    return (server.processor_s() - before) / calls * 1e6


if __name__ == "__main__":
    main()
