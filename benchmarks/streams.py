"""Opens many streams at once and leaves them open: `python -m benchmarks.streams --streams 10000 --workers 2`.

With `--cut` an update of the weights interrupts all of them, and they go on after it.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import aiohttp
import orjson
import uvloop

from benchmarks import load
from benchmarks.load import chat
from benchmarks.servers import Server, allow_many_sockets, family, serving, started
from benchmarks.upstream import CUT_PROMPT, CUT_TOKENS, prompt_ids, sampled_ids

CONNECTED_AT_ONCE = 500
OPENED_AT_ONCE = 100  # of those that are cut
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


class Reader(load.Client):
    """A client that keeps what it reads."""

    read = b""

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self.read += data
        super().data_received(data)


async def cut(streams: int, processes: int, folder: str) -> str:
    """Return what it costs proxies with one store to interrupt all streams, and to resume them."""
    body = {"messages": [{"role": "user", "content": "word " * CUT_PROMPT}], "stream": True, "model": "m"}
    figures, lags = [], [f"{folder}/lags{number}" for number in range(processes)]
    with ExitStack() as stack:
        engine = stack.enter_context(started("upstream", "cut"))
        servers = [
            stack.enter_context(started("tokentape", engine.url, store, "faithful", "", "", path))
            for path, store in zip(
                lags, (f"embedded:{folder}/store", *[f"unix:{folder}/store/valkey.sock"] * 99), strict=False
            )
        ]
        clients = await _opened(servers, orjson.dumps(body), streams)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            for path, change in (("pause?drain_s=600", {"in_flight": "resume"}), ("resume", {})):
                for server in servers:
                    os.kill(server.pid, signal.SIGUSR1)
                    server.forget_peak()
                began = time.perf_counter()
                used, before = [
                    sum(each) for each in zip(*((s.processor_s()[0], resident_mb(s)) for s in servers), strict=True)
                ]
                async with http.post(f"{servers[0].url}/policy/{path}", json=change) as response:
                    response.raise_for_status()
                    paused = await response.json()
                if path == "resume":
                    await asyncio.wait([client.done for client in clients])
                took_s = time.perf_counter() - began
                spent = (sum(server.processor_s()[0] for server in servers) - used) / streams * 1e6
                peak = sum(server.peak_bytes() for server in servers) / 1e6
                figures.append(
                    f"{path}: {took_s:.1f} s, {spent:,.0f} µs of CPU per call, memory {before:,.0f} to at most {peak:,.0f} MB,"
                    f" {paused}"
                )
            figures.append(f"{sum(map(_is_whole, clients)):,} whole replies")
            expected, rows = [*prompt_ids(CUT_PROMPT), *sampled_ids()[:CUT_TOKENS]], Counter[bool]()
            async with http.get(f"{servers[0].url}/export?format=sequences&container=ndjson") as export:
                async for line in export.content:
                    rows[orjson.loads(line)["token_ids"] == expected] += 1
            figures.append(f"rows with exactly the sampled tokens: {rows[True]:,}, others: {rows[False]}")
    for path in lags:
        with open(path) as written:  # noqa: PTH123
            highest = [[round(1000 * lag, 1) for lag in phase] for phase in json.load(written)[1:]]
        figures.append(f"the loop's longest work without looking for events, in ms of CPU: {highest}")
    return "\n".join(figures)


async def _opened(servers: Sequence[Server], body: bytes, streams: int) -> list[Reader]:
    """Return clients whose streams have all begun."""
    clients: list[Reader] = []
    for number in range(streams):
        clients.append(await load.connect(servers[number % len(servers)].port, Reader))
        clients[-1].call(load.Calls([body]).request(0, f"cut-{number}"))
        while number % OPENED_AT_ONCE == 0 and not all(b" word3" in client.read for client in clients):
            await asyncio.sleep(0.05)
    while not all(b" word3" in client.read for client in clients):
        await asyncio.sleep(0.05)
    return clients


def _is_whole(client: Reader) -> bool:
    """Return whether a client has read each token once, and the end."""
    words = [f" word{at}" for at in range(CUT_TOKENS - 1)]
    content = re.findall(rb'"content":"([^"]+)"', client.read)
    return content == [*map(str.encode, words), b" end"] and client.done.exception() is None


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cut", action="store_true")
    options = parser.parse_args()
    allow_many_sockets()
    if options.cut:
        with tempfile.TemporaryDirectory() as folder:
            print(uvloop.run(cut(options.streams, options.workers, folder)))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as engine,
        serving(engine.url, folder, options.workers) as server,
    ):
        print(asyncio.run(opened(server, options.streams)))


if __name__ == "__main__":
    main()
