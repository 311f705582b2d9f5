"""Measures what the buckets and the index of a store cost its servers: `python -m benchmarks.buckets --store URL`.

The URL is of a server or a cluster that nothing else uses; the rollouts are written under prefixes of their own, and deleted.
Each figure is CPU time of all servers for one operation, and the median time that the client waits for it alone.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from storage import StoreOptions, open_store
from storage.redis.server_info import fetch_info
from storage.redis.store import Store
from storage.types import StepWrite

COUNTS = (16, 256, 1024)
ROUNDS = 100
TOGETHER = 100  # calls, whose commands share writes
STATUS = b'"completed"'


async def cpu_us(store: Store) -> float:
    """Return the CPU time that all servers of a store have used."""
    infos = [await fetch_info(server) for server in await store._servers.all()]  # noqa: SLF001 - of INFO
    return sum(float(info.fields[f"used_cpu_{kind}"]) for info in infos for kind in ("user", "sys")) * 1e6


async def write(store: Store, rollouts: int) -> dict[str, float]:
    """Open rollouts, append a step to each, and finish them; return the CPU time of each call in µs."""
    incarnations: dict[str, str] = {}

    async def opened(name: str) -> None:
        incarnations[name] = (await store.open(name, {}, now_ms=time.time_ns() // 10**6)).incarnation

    async def appended(name: str) -> None:
        block, counts, first = {b"b": b"y" * 100}, {"steps": 1, "exact": 1}, {"policy": b'"default"'}
        step = StepWrite(name, incarnations[name], "s", b"x" * 600, block, (), counts, first=first)
        await store.append(step, now_ms=1)

    async def finished(name: str) -> None:
        await store.update_if(name, {"status": STATUS}, expect={"status": None}, now_ms=1)

    names = [f"rollout-{number}" for number in range(rollouts)]
    found = {}
    for what, call in (("open", opened), ("append", appended), ("finish", finished)):
        before = await cpu_us(store)
        for start in range(0, rollouts, TOGETHER):
            await asyncio.gather(*map(call, names[start : start + TOGETHER]))
        found[what] = (await cpu_us(store) - before) / rollouts
    return found


async def measured(store: Store, call: Callable[[], Awaitable[object]]) -> str:
    """Return the CPU time of a call in µs, and how long it takes in ms."""
    await call()
    before, times = await cpu_us(store), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return f"{(await cpu_us(store) - before) / ROUNDS:,.0f} µs, {median(times) * 1e3:.1f} ms"


async def column(url: str, count: int, rollouts: int) -> dict[str, str]:
    """Measure a store with this number of buckets."""
    store = await open_store(url, StoreOptions(prefix=f"buckets-{count}-{time.time_ns()}", buckets=count))
    plain = await open_store(url, StoreOptions(prefix=store.layout.prefix + "-plain", buckets=count, indexed={}))
    found = {f"{what}, without the index": f"{us:.1f} µs" for what, us in (await write(plain, rollouts)).items()}
    found |= {what: f"{us:.1f} µs" for what, us in (await write(store, rollouts)).items()}
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "page of 100 names": lambda: store.listing.page(None, 100),
        "page of 100 names by status": lambda: store.listing.page_of("status", STATUS, None, 100, None, None),
        "100 rollouts with marks": lambda: store.get_all([f"rollout-{n}" for n in range(100)], with_marks=True),
        "sweep of deadlines, none due": lambda: store.timers.claim(1, now_ms=1, until_ms=2),
        "turn of a process that does not sweep": lambda: store.timers.has_turn(1000),
        "look for what the index lacks": store.listing.look_for_repairs,
        "announcement": lambda: store.announcements.announce("policy", b"1"),
    }
    for what, call in calls.items():
        found[what] = await measured(store, call)
    for written in (store, plain):
        names = [name async for name in written.names()]
        for start in range(0, len(names), TOGETHER):
            await asyncio.gather(*map(written.delete, names[start : start + TOGETHER]))
        await written.close()
    return found


async def table(url: str, rollouts: int) -> Table:
    """Return the table of one store."""
    columns = {count: await column(url, count, rollouts) for count in COUNTS}
    shown = Table(title=url)
    for header in ("", *(f"{count} buckets" for count in COUNTS)):
        shown.add_column(header, justify="right" if header else "left")
    for what in columns[COUNTS[0]]:
        shown.add_row(what, *(columns[count][what] for count in COUNTS))
    return shown


def main() -> None:
    """Print a table for each store of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buckets", description=__doc__)
    parser.add_argument("--store", required=True, action="append", metavar="URL", help="redis://… or redis+cluster://…")
    parser.add_argument("--rollouts", type=int, default=10_000, help="of each store (default: %(default)s)")
    options = parser.parse_args()
    for url in options.store:
        Console(width=120).print(uvloop.run(table(url, options.rollouts)))


if __name__ == "__main__":
    main()
