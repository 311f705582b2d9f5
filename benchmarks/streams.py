"""Opens many streams at once and leaves them open: `python -m benchmarks.streams --streams 10000 --workers 2`.

With `--cut` an update of the weights interrupts all of them, and they go on after it.
"""

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections import Counter

import aiohttp
import orjson
import uvloop
from aiohttp import web

from benchmarks import load
from benchmarks.load import chat
from benchmarks.servers import Server, allow_many_sockets, family, serving, started
from proxy.simulator.options import Options
from proxy.simulator.server import make_engine

CONNECTED_AT_ONCE = 500
OPENED_AT_ONCE = 100  # of those that are cut
TOKENS = 8  # of a stream that is cut
TOKEN_DELAY_S = 12.0  # by then all streams are open
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


async def cut(streams: int, folder: str) -> str:
    """Return what it costs a proxy to interrupt all streams, and to resume them. This process is the engine, too."""
    options = Options(token_delay_s=TOKEN_DELAY_S, seed=1)
    bodies = orjson.dumps(
        {"messages": [{"role": "user", "content": "word " * 200}], "stream": True, "max_tokens": TOKENS}
    )
    calls, lags, figures = load.Calls([bodies]), f"{folder}/lags", []
    runner = web.AppRunner(make_engine(options), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    engine = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with started("tokentape", engine, f"embedded:{folder}/store", "faithful", "", "", lags) as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            clients: list[load.Client] = []
            running = []
            for _ in range(0, streams, OPENED_AT_ONCE):
                clients += await asyncio.gather(*(load.connect(server.port) for _ in range(OPENED_AT_ONCE)))
                for number, client in enumerate(clients[-OPENED_AT_ONCE:], len(running)):
                    running.append(client.call(calls.request(0, f"cut-{number}")))
                while not all(client.first for client in clients):
                    await asyncio.sleep(0.05)
            await asyncio.sleep(2 * TOKEN_DELAY_S)
            for path, body in (("pause?drain_s=600", {"in_flight": "resume"}), ("resume", {})):
                os.kill(server.pid, signal.SIGUSR1)
                server.forget_peak()
                options.requests.clear()
                began, used, before = time.perf_counter(), server.processor_s()[0], resident_mb(server)
                async with http.post(f"{server.url}/policy/{path}", json=body) as response:
                    response.raise_for_status()
                while path == "resume" and options.requests["/v1/chat/completions"] < streams:
                    await asyncio.sleep(0.02)
                spent = (server.processor_s()[0] - used) / streams * 1e6
                figures.append(
                    f"{path}: {time.perf_counter() - began:.1f} s, {spent:,.0f} µs of CPU per call, memory"
                    f" {before:,.0f} to at most {server.peak_bytes() / 1e6:,.0f} MB, requests {dict(options.requests)}"
                )
            await asyncio.gather(*running)
            async with http.get(f"{server.url}/metrics") as metrics:
                lines = (await metrics.text()).splitlines()
            figures += [line for line in lines if line.startswith("tokentape_resumed_calls_total{")]
    with open(lags) as written:  # noqa: PTH123
        highest = [[round(1000 * lag, 1) for lag in phase] for phase in json.load(written)[1:]]
    return "\n".join([*figures, f"the loop's longest work without looking for events, in ms of CPU: {highest}"])


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
            print(uvloop.run(cut(options.streams, folder)))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        started("upstream") as engine,
        serving(engine.url, folder, options.workers) as server,
    ):
        print(asyncio.run(opened(server, options.streams)))


if __name__ == "__main__":
    main()
