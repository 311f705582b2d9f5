"""Opens many streams at once and leaves them open: `python -m benchmarks.streams --streams 10000 --workers 2`."""

import argparse
import asyncio
import tempfile
import time
import urllib.request
from collections import Counter

from benchmarks import load
from benchmarks.load import chat
from benchmarks.servers import Server, allow_many_sockets, family, serving, started

CONNECTED_AT_ONCE = 500
GAUGES = (
    "tokentape_connections",
    "tokentape_in_flight_calls",
    "tokentape_waiting_calls",
    "tokentape_waiting_connections",
)


def resident_mb(server: Server) -> float:
    """Return the resident memory of the processes of a proxy."""
    return sum(Server(0, pid).resident_bytes() for pid, name in family(server.pid) if "valkey" not in name) / 1e6


def gauges(server: Server) -> dict[str, float]:
    """Return the gauges of connections and calls."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = [line.split(" ") for line in response.read().decode().splitlines()]
    return {name: float(value) for name, value in (line for line in lines if line[0] in GAUGES)}


async def opened(server: Server, streams: int) -> str:
    """Open the streams; return what was measured once each has its first byte."""
    before, most = resident_mb(server), Counter[str]()
    started_at = time.perf_counter()
    clients: list[load.Client] = []
    for _ in range(0, streams, CONNECTED_AT_ONCE):
        clients += await asyncio.gather(*(load.connect(server.port) for _ in range(CONNECTED_AT_ONCE)))
    connected_at = time.perf_counter()
    calls = [client.call(chat("hang").request(0, f"open-{number}")) for number, client in enumerate(clients)]
    while not all(client.first for client in clients):
        most |= Counter(await asyncio.to_thread(gauges, server))
        await asyncio.sleep(0.5)
        for call in calls:
            if call.done():
                call.result()  # a stream that ended was refused or cut
    started_s, connected_s = time.perf_counter() - connected_at, connected_at - started_at
    grown = (resident_mb(server) - before) * 1000 / streams
    for client in clients:
        client.transport.close()
    await asyncio.gather(*calls, return_exceptions=True)
    return (
        f"{streams:,} connections after {connected_s:.1f} s, all streams have begun after {started_s:.1f} s more; "
        f"{grown:.0f} kB per stream; highest gauges {dict(most)}"
    )


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    allow_many_sockets()
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as engine,
        serving(engine.url, folder, options.workers) as server,
    ):
        print(asyncio.run(opened(server, options.streams)))


if __name__ == "__main__":
    main()
