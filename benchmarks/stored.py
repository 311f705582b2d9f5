"""Measures what grows with the number of stored rollouts: `python -m benchmarks.stored --sizes 0 10000 100000`.

A Valkey without persistence is filled with `benchmarks.fill`; a proxy in front of the engine of the benchmarks uses it. A
store at `--store URL`, which has as many rollouts and groups as `--sizes` and `--groups` name, is measured as it is.
"""

import argparse
import asyncio
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import aiohttp
import redis
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks import load, results
from benchmarks.fill import Share, fill_all
from benchmarks.load import chat
from benchmarks.servers import Server, free_port, started
from proxy.clock import SystemClock
from proxy.rollouts.archive.archiver import ArchiveOptions, Archiver
from proxy.rollouts.archive.dataset import Dataset
from proxy.telemetry.metrics import make_metrics
from storage import open_store
from storage.embedded.server import bundled_server

GROUPS_OF = 20  # rollouts for each group in the queue
CALLS = 500
TIMES = 5
_UI = ("/ui", "/rollouts?limit=100", "/groups?limit=50", "/training?limit=100")


@contextmanager
def store_server() -> Iterator[str]:
    """Run a Valkey without persistence; yield its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        words = [str(bundled_server()), "--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            with redis.Redis(port=port) as client:
                while not _is_up(client):
                    time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _is_up(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


async def _taken(work: Callable[[], Awaitable[object]], times: int = TIMES) -> float:
    """Return the median time in ms."""
    taken = []
    for _ in range(times):
        started_at = time.perf_counter()
        await work()
        taken.append(time.perf_counter() - started_at)
    return 1000 * median(taken)


async def calls_of(server: Server) -> tuple[float, float]:
    """Return the median and the 99th percentile in ms of unstreamed calls of new rollouts, ten in each."""
    client, taken, name = await load.connect(server.port), [], ""
    for number in range(CALLS):
        if number % 10 == 0:
            name = f"call-{time.time_ns()}"
        request = chat("whole").request(number % 10, name)
        started_at = time.perf_counter()
        await client.call(request)
        taken.append(time.perf_counter() - started_at)
    client.transport.close()
    taken = sorted(taken[CALLS // 10 :])
    return 1000 * median(taken), 1000 * taken[len(taken) * 99 // 100]


class Reads:
    """Requests to the control API of a server; each method returns ms."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def get(self, path: str) -> bytes:
        async with self._http.get(self._url + path) as response:
            body = await response.read()
            assert response.status == 200, body[:300]
            return body

    async def page(self, path: str) -> float:
        """Measure a GET."""
        return await _taken(lambda: self.get(path))

    async def pages(self, query: str, count: int) -> list[float]:
        """Measure pages of the list of rollouts, one after the other."""
        taken, cursor = [], ""
        for _ in range(count):
            started_at = time.perf_counter()
            async with self._http.get(f"{self._url}/rollouts?{query}{cursor}") as response:
                body = await response.json()
            taken.append(1000 * (time.perf_counter() - started_at))
            if body["cursor"] is None:
                break
            cursor = f"&cursor={body['cursor']}"
        return taken

    async def claims(self, count: int) -> float:
        """Measure claims of a group, each acknowledged."""
        claim = {"consumer": "benchmark", "groups": 1, "format": "sequences"}
        taken = []
        for _ in range(count):
            started_at = time.perf_counter()
            async with self._http.post(f"{self._url}/batches/claim", json=claim) as response:
                batch = await response.json()
            taken.append(time.perf_counter() - started_at)
            if batch["batch_id"] is None:
                return 0.0
            async with self._http.post(f"{self._url}/batches/{batch['batch_id']}/ack") as response:
                assert response.status == 200
        return 1000 * median(taken)


async def deadlines(url: str) -> float:
    """Measure the claim of expired timers by which each process looks for deadlines, once a second."""
    store = await open_store(url)
    now_ms = SystemClock().now_ms()
    taken = await _taken(lambda: store.timers.claim(8, now_ms=now_ms, until_ms=now_ms + 10_000))
    await store.close()
    return taken


async def sweep(url: str) -> float:
    """Measure a sweep of the archive that finds nothing to write, in s."""
    store = await open_store(url)
    with tempfile.TemporaryDirectory() as folder:
        metrics, clock = make_metrics(CollectorRegistry()), SystemClock()
        archiver = Archiver(store, clock, metrics, Dataset(folder), ArchiveOptions(older_than_s=10**7))
        started_at = time.perf_counter()
        await archiver.sweep()
        taken = time.perf_counter() - started_at
    await store.close()
    return taken


async def measured(server: Server, url: str) -> dict[str, str]:
    """Return what is measured of a server and its store."""
    half, most = await calls_of(server)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        reads = Reads(http, server.url)
        found = {"call p50": half, "p99": most}
        found |= {
            "page of 100": await reads.page("/rollouts?limit=100"),
            "1,000": await reads.page("/rollouts?limit=1000"),
        }
        found["20 pages, slowest"] = max(await reads.pages("limit=100", 20))
        found["failed ones"] = await reads.page("/rollouts?limit=100&status=failed")
        found["of a policy"] = await reads.page("/rollouts?limit=100&policy=judge&status=aborted")
        half_a_day_ago = int(time.time()) - 43_200
        found["of before 12 h"] = await reads.page(f"/rollouts?limit=100&until={half_a_day_ago}")
        found["claim"] = await reads.claims(20)
        found["timers"] = await deadlines(url)
        found["/ui"] = sum([await reads.page(path) for path in _UI])
        found["/metrics"] = await reads.page("/metrics")
    return {name: f"{value:,.1f}" for name, value in found.items()} | {"archive sweep, s": f"{await sweep(url):,.2f}"}


def point(engine: Server, url: str) -> dict[str, str]:
    """Start a proxy on a store and measure it."""
    started_at = time.perf_counter()
    with started("tokentape", engine.url, url) as server:
        start_ms = 1000 * (time.perf_counter() - started_at)
        return {"start": f"{start_ms:,.0f}"} | asyncio.run(measured(server, url))


def main() -> None:
    """Measure the sizes that the command line names, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 10_000, 100_000], help="stored rollouts")
    parser.add_argument("--store", metavar="URL", help="a filled store, which is measured as it is")
    options = parser.parse_args()
    console, rows = Console(width=200), dict[str, dict[str, str]]()

    def note(size: str, row: dict[str, str]) -> None:
        rows[size] = row
        console.print(size, row)  # the next size may take long

    with started("upstream") as engine:
        if options.store:
            note("as it is", point(engine, options.store))
        else:
            with store_server() as url:
                for before, size in pairwise([0, *options.sizes]):
                    note(f"{size:,}", _grown(engine, url, before, size))
    table = Table("stored rollouts", *next(iter(rows.values())))
    for size, row in rows.items():
        table.add_row(size, *row.values())
    console.print(f"{results.machine()}; ms unless named otherwise", table)


def _grown(engine: Server, url: str, before: int, size: int) -> dict[str, str]:
    groups = range(before // GROUPS_OF, size // GROUPS_OF)
    fill_all(Share(url, "tt", range(before, size), groups))
    return point(engine, url)


if __name__ == "__main__":
    main()
