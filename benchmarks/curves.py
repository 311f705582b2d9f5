"""Costs as functions of a quantity: one function per quantity, together a few minutes."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks import load
from benchmarks.load import chat
from benchmarks.rows import Places, conversation
from benchmarks.servers import Server, serving, started
from benchmarks.upstream import SAMPLED_TOKENS, SLOW_S

ROUNDS = 3
PROMPTS = (1_000, 8_000, 32_000, 128_000)
IN_FLIGHT = (1, 10, 100, 1_000, 5_000)
STEPS = (1, 10, 100, 500, 2_000)


@dataclass(frozen=True)
class Curve:
    """A series of measurements: at each value of `x`, columns by name. `panels` are titles of plots with their columns."""

    name: str
    title: str
    x: str
    how: str
    points: Sequence[tuple[int, Mapping[str, float]]]
    panels: Mapping[str, Sequence[str]]


def _rates(
    places: Places, calls: load.Calls, *, clients: int, rollouts: int, refused: list[Exception] | None = None
) -> tuple[float, float, float]:
    """Return calls per second through bare and TokenTape, and their ratio: medians of alternating rounds."""
    pairs = []
    for _ in range(ROUNDS):
        bare = asyncio.run(load.throughput(places.bare.port, calls, clients=clients, rollouts=rollouts))
        ours = load.throughput(places.tokentape.port, calls, clients=clients, rollouts=rollouts, refused=refused)
        pairs.append((bare, asyncio.run(ours)))
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), median(b / a for a, b in pairs)


def _both(places: Places) -> tuple[Server, Server]:
    return places.bare, places.tokentape


def _latencies(places: Places, mode: str, calls: int) -> tuple[list[float], list[float]]:
    """Return ms to the whole response and to the first byte, each through bare and TokenTape, with one client."""
    rounds = [
        [asyncio.run(load.latency(place.port, mode, calls=calls)) for place in _both(places)] for _ in range(ROUNDS)
    ]
    whole, first = ([1000 * median(pair[server][which] for pair in rounds) for server in (0, 1)] for which in (0, 1))
    return whole, first


def prompts(places: Places) -> Curve:
    """Measure calls by prompt length."""
    points = []
    for tokens in PROMPTS:
        calls = max(8, min(160, 640_000 // tokens))
        whole, _ = _latencies(places, f"whole-{tokens}", calls)
        _, first = _latencies(places, f"stream-{tokens}", calls)
        *_, unstreamed = _rates(places, chat(f"whole-{tokens}"), clients=4, rollouts=max(1, calls // 40))
        *_, streamed = _rates(places, chat(f"stream-{tokens}"), clients=4, rollouts=max(1, calls // 40))
        columns = {"whole, bare (ms)": whole[0], "whole, TokenTape (ms)": whole[1]}
        columns |= {"first byte, bare (ms)": first[0], "first byte, TokenTape (ms)": first[1]}
        points.append((tokens, columns | {"unstreamed, x bare": unstreamed, "streamed, x bare": streamed}))
    shares, latencies = ["unstreamed, x bare", "streamed, x bare"], [name for name in points[0][1] if "ms" in name]
    how = "Latency with one client; calls/s with 4 clients, relative to bare. Each client repeats a prompt in its own rollout."
    panels = {"calls/s, x bare": shares, "latency, ms": latencies}
    return Curve("prompts", "Growth with the prompt length", "prompt tokens", how, points, panels)


def in_flight(places: Places) -> Curve:
    """Measure concurrent calls to a fast and a slow engine, with a new server for its peak memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        own = Places(places.direct, places.bare, server)
        points = [(clients, _at_once(own, clients)) for clients in IN_FLIGHT]
    panels = {
        "x bare": ["calls/s, x bare", "time of slow calls, x bare"],
        "unstreamed calls/s": ["bare (calls/s)", "TokenTape (calls/s)"],
        "peak resident memory, MB": ["peak memory (MB)"],
    }
    how = (
        "Concurrent clients that start together, with calls of 1,000 + 200 tokens: repeated calls to an engine that responds "
        f"immediately (calls/s), and one call each to an engine that takes {SLOW_S:.0f} s (time until all are complete)."
    )
    return Curve("in-flight", "Growth with calls in flight", "calls in flight", how, points, panels)


def _at_once(places: Places, clients: int) -> dict[str, float]:
    places.tokentape.forget_peak()
    refused: list[Exception] = []
    calls, rollouts = (chat("whole"), 32 // clients or 1) if clients < 100 else (chat("whole", 1 + 320 // clients), 1)
    bare, ours, ratio = _rates(places, calls, clients=clients, rollouts=rollouts, refused=refused)
    slow = [asyncio.run(load.at_once(place.port, "slow", clients)) for place in _both(places)]
    columns = {"bare (calls/s)": bare, "TokenTape (calls/s)": ours, "calls/s, x bare": ratio, "refused": len(refused)}
    columns |= {"time of slow calls, x bare": slow[1][0] / slow[0][0], "slow ones refused": clients - slow[1][1]}
    return columns | {"peak memory (MB)": places.tokentape.peak_bytes() / 1e6}


def steps(places: Places) -> Curve:
    """Measure calls and reads by the number of steps in the rollout."""

    async def measure(server: Server, socket: Path, count: int) -> dict[str, float]:
        name = f"with-{count}"
        await load.fill(socket, 1, conversation(count, 16 * count, "r"), names=lambda _: name)
        page = await _milliseconds(server, f"/rollouts/{name}/steps?limit=50")
        export = await _milliseconds(server, f"/rollouts/{name}/export?format=sequences&container=arrow")
        tree = await _milliseconds(server, f"/rollouts/{name}/tree")
        call = await _call_ms(server, name)
        bare = await _call_ms(places.bare, name)
        columns = {"a call, bare (ms)": bare, "a call (ms)": call, "a page of its steps (ms)": page}
        return columns | {"its export (ms)": export, "its tree (ms)": tree}

    points = _over(places, STEPS, measure)
    panels = {
        "latency of a call, ms": ["a call, bare (ms)", "a call (ms)"],
        "latency of reads, ms": ["a page of its steps (ms)", "its export (ms)", "its tree (ms)"],
    }
    how = "A rollout of turns of 8 + 8 tokens; then calls of 1,000 + 200 tokens and reads over HTTP, with one client."
    return Curve("steps", "Growth with steps in a rollout", "steps in the rollout", how, points, panels)


def workers(places: Places) -> Curve:
    """Measure calls by the number of worker processes (`serve --workers`)."""
    points = []
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as folder, serving(places.direct.url, folder, count) as server:
            trio = Places(places.direct, places.bare, server)
            _, whole, unstreamed = _rates(trio, chat("whole"), clients=32, rollouts=3)
            _, stream, streamed = _rates(trio, chat("stream"), clients=32, rollouts=1)
        columns = {"unstreamed (steps/s)": whole, "unstreamed (tokens/s)": whole * SAMPLED_TOKENS}
        columns |= {"streamed (steps/s)": stream, "streamed (tokens/s)": stream * SAMPLED_TOKENS}
        points.append((count, columns | {"unstreamed, x bare": unstreamed, "streamed, x bare": streamed}))
    panels = {
        "steps/s": ["unstreamed (steps/s)", "streamed (steps/s)"],
        "x bare (one process)": ["unstreamed, x bare", "streamed, x bare"],
    }
    how = (
        "Recorded steps and sampled tokens per second, 32 clients. Engine, clients, store and workers share the cores."
    )
    return Curve("workers", "Growth with workers", "workers", how, points, panels)


Measure = Callable[[Server, Path, int], Coroutine[Any, Any, dict[str, float]]]


def _over(places: Places, counts: Sequence[int], measure: Measure) -> list[tuple[int, dict[str, float]]]:
    """Return the points of a curve over the contents of a store, with a new server and store."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        return [(count, asyncio.run(measure(server, Path(folder) / "store/valkey.sock", count))) for count in counts]


async def _milliseconds(server: Server, path: str, times: int = 5) -> float:
    """Return the median time of a GET with its whole body."""
    taken = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        for _ in range(times):
            started_at = time.perf_counter()
            async with http.get(server.url + path) as answer:
                read = await answer.read()
                assert answer.status == 200, read[:300]
            taken.append(time.perf_counter() - started_at)
    return 1000 * median(taken)


async def _call_ms(server: Server, rollout: str, times: int = 40) -> float:
    """Return the median time of an unstreamed call of this rollout, without the first quarter of the calls."""
    client = await load.connect(server.port)
    request = chat("whole").request(0, rollout)
    taken = []
    for _ in range(times):
        started_at = time.perf_counter()
        await client.call(request)
        taken.append(time.perf_counter() - started_at)
    client.transport.close()
    return 1000 * median(taken[times // 4 :])


CURVES: Mapping[str, Callable[[Places], Curve]] = {
    "prompts": prompts,
    "in-flight": in_flight,
    "steps": steps,
    "workers": workers,
}
