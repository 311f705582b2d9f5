"""How costs grow: one function for each quantity that may grow, each in points small enough for minutes in all."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks import exporting, load
from benchmarks.rows import Places, conversation
from benchmarks.servers import Server, knows_workers, serving, started
from benchmarks.upstream import SAMPLED_TOKENS, SLOW_S

ROUNDS = 3
PROMPTS = (1_000, 8_000, 32_000, 128_000)
IN_FLIGHT = (1, 10, 100, 1_000, 5_000)
STEPS = (1, 10, 100, 500, 2_000)
STORED = (1_000, 10_000, 100_000)


@dataclass(frozen=True)
class Curve:
    """What was measured at each point: `columns` by name, over `x`. `panels` are titles of plots and the columns in them."""

    name: str
    title: str
    x: str
    how: str
    points: Sequence[tuple[int, Mapping[str, float]]]
    panels: Mapping[str, Sequence[str]]


def _rates(
    places: Places,
    mode: str,
    *,
    clients: int,
    calls: int,
    rounds: int = ROUNDS,
    refused: list[Exception] | None = None,
) -> tuple[float, float, float]:
    """Calls a second through bare and through TokenTape, in turn, and the median of the rounds' ratios."""
    pairs = []
    for _ in range(rounds):
        bare = asyncio.run(load.throughput(places.bare.port, mode, clients=clients, calls=calls))
        ours = load.throughput(places.tokentape.port, mode, clients=clients, calls=calls, refused=refused)
        pairs.append((bare, asyncio.run(ours)))
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), median(b / a for a, b in pairs)


def _both(places: Places) -> tuple[Server, Server]:
    return places.bare, places.tokentape


def _latencies(places: Places, mode: str, calls: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the whole reply and to the first byte, of one client, through bare and through TokenTape."""
    rounds = [
        [asyncio.run(load.latency(place.port, mode, calls=calls)) for place in _both(places)] for _ in range(ROUNDS)
    ]
    whole, first = ([1000 * median(one[at][which] for one in rounds) for at in (0, 1)] for which in (0, 1))
    return whole, first


def prompts(places: Places) -> Curve:
    """The prompt's length."""
    points = []
    for tokens in PROMPTS:
        calls = max(8, min(160, 640_000 // tokens))
        whole, _ = _latencies(places, f"whole-{tokens}", calls)
        _, first = _latencies(places, f"stream-{tokens}", calls)
        *_, unstreamed = _rates(places, f"whole-{tokens}", clients=4, calls=calls)
        *_, streamed = _rates(places, f"stream-{tokens}", clients=4, calls=calls)
        columns = {"whole, bare (ms)": whole[0], "whole, TokenTape (ms)": whole[1]}
        columns |= {"first byte, bare (ms)": first[0], "first byte, TokenTape (ms)": first[1]}
        points.append((tokens, columns | {"unstreamed, x bare": unstreamed, "streamed, x bare": streamed}))
    shares, latencies = ["unstreamed, x bare", "streamed, x bare"], [name for name in points[0][1] if "ms" in name]
    how = "Latencies of one client; calls a second of 4 clients against bare's. Each client has a rollout, its prompt repeated."
    panels = {"calls a second, x bare": shares, "latency, ms": latencies}
    return Curve("prompts", "Growth with the prompt's length", "prompt tokens", how, points, panels)


def in_flight(places: Places) -> Curve:
    """Calls at once, of an engine that answers at once and of one that takes its time; a server of its own, for its memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        own = Places(places.direct, places.bare, server)
        points = [(clients, _at_once(own, clients)) for clients in IN_FLIGHT]
    panels = {
        "x bare": ["calls/s, x bare", "time of slow calls, x bare"],
        "unstreamed calls a second": ["bare (calls/s)", "TokenTape (calls/s)"],
        "resident memory at its peak, MB": ["peak memory (MB)"],
    }
    how = (
        "As many clients, who start in the same instant and make one call at a time, of 1,000 + 200 tokens: of an engine that "
        f"answers at once (calls a second), and one call each of an engine that takes {SLOW_S:.0f} s (time until all are over)."
    )
    return Curve("in-flight", "Growth with calls in flight", "calls in flight", how, points, panels)


def _at_once(places: Places, clients: int) -> dict[str, float]:
    places.tokentape.forget_peak()
    refused: list[Exception] = []
    rounds, calls = ROUNDS if clients < 1_000 else 1, max(clients, 320)
    bare, ours, ratio = _rates(places, "whole", clients=clients, calls=calls, rounds=rounds, refused=refused)
    slow = [asyncio.run(load.at_once(place.port, "slow", clients)) for place in _both(places)]
    columns = {"bare (calls/s)": bare, "TokenTape (calls/s)": ours, "calls/s, x bare": ratio, "refused": len(refused)}
    columns |= {"time of slow calls, x bare": slow[1][0] / slow[0][0], "slow ones refused": clients - slow[1][1]}
    return columns | {"peak memory (MB)": places.tokentape.peak_bytes() / 1e6}


def steps(places: Places) -> Curve:
    """Steps in the rollout that a call belongs to."""

    async def measure(server: Server, socket: Path, count: int) -> dict[str, float]:
        name = f"with-{count}"
        await exporting.fill(socket, 1, conversation(count, 16 * count, "r"), names=lambda _: name)
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
        "latency of reading, ms": ["a page of its steps (ms)", "its export (ms)", "its tree (ms)"],
    }
    how = "A conversation of so many turns of 8 + 8 tokens; a call of 1,000 + 200 tokens, and reading over HTTP. One client."
    return Curve("steps", "Growth with steps in a rollout", "steps in the rollout", how, points, panels)


def stored(places: Places) -> Curve:
    """Rollouts in the store."""
    there = 0

    async def measure(server: Server, socket: Path, count: int) -> dict[str, float]:
        nonlocal there
        await exporting.fill(socket, count - there, conversation(2, 64, "r"), first=there)
        there = count
        page = await _milliseconds(server, "/rollouts?limit=100")
        export = await _milliseconds(server, "/rollouts/r7/export?format=sequences&container=arrow")
        call = await _call_ms(server, f"with-{count}")
        bare = await _call_ms(places.bare, "r")
        columns = {"a call, bare (ms)": bare, "a call (ms)": call}
        return columns | {"a page of 100 rollouts (ms)": page, "export of one rollout (ms)": export}

    points = _over(places, STORED, measure)
    panels = {
        "latency of a call, ms": ["a call, bare (ms)", "a call (ms)"],
        "latency of reading, ms": ["a page of 100 rollouts (ms)", "export of one rollout (ms)"],
    }
    how = "Rollouts of two steps, put into the store directly; then one client, over HTTP."
    return Curve("stored", "Growth with stored rollouts", "stored rollouts", how, points, panels)


def workers(places: Places) -> Curve:
    """Processes on one port, as `serve --workers` runs them; one where it cannot."""
    points = []
    for count in (1, 2) if knows_workers() else (1,):
        with tempfile.TemporaryDirectory() as folder, _serving(places, folder, count) as server:
            trio = Places(places.direct, places.bare, server)
            _, whole, unstreamed = _rates(trio, "whole", clients=32, calls=960)
            _, stream, streamed = _rates(trio, "stream", clients=32, calls=192)
        columns = {"unstreamed (steps/s)": whole, "unstreamed (tokens/s)": whole * SAMPLED_TOKENS}
        columns |= {"streamed (steps/s)": stream, "streamed (tokens/s)": stream * SAMPLED_TOKENS}
        points.append((count, columns | {"unstreamed, x bare": unstreamed, "streamed, x bare": streamed}))
    panels = {
        "steps a second": ["unstreamed (steps/s)", "streamed (steps/s)"],
        "x bare (one process)": ["unstreamed, x bare", "streamed, x bare"],
    }
    how = "32 clients, sampled tokens and recorded steps a second. Engine, load and store share the cores with the workers."
    return Curve("workers", "Growth with workers", "workers", how, points, panels)


def _serving(places: Places, folder: str, count: int) -> Any:
    if not knows_workers():
        return started("tokentape", places.direct.url, f"embedded:{folder}/store")
    return serving(places.direct.url, folder, count)


Measure = Callable[[Server, Path, int], Coroutine[Any, Any, dict[str, float]]]


def _over(places: Places, counts: Sequence[int], measure: Measure) -> list[tuple[int, dict[str, float]]]:
    """The points of a curve over what is in a store: a server of its own, empty at first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        return [(count, asyncio.run(measure(server, Path(folder) / "store/valkey.sock", count))) for count in counts]


async def _milliseconds(server: Server, path: str, times: int = 5) -> float:
    """The median time of a GET, read whole."""
    taken = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        for _ in range(times):
            begun = time.perf_counter()
            async with http.get(server.url + path) as answer:
                read = await answer.read()
                assert answer.status == 200, read[:300]
            taken.append(time.perf_counter() - begun)
    return 1000 * median(taken)


async def _call_ms(server: Server, rollout: str, times: int = 40) -> float:
    """The median time of an unstreamed call of this rollout, the first ones aside."""
    client = await load.connect(server.port)
    request = load.request_for("whole", rollout)
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        await client.call(request)
        taken.append(time.perf_counter() - begun)
    client.transport.close()
    return 1000 * median(taken[times // 4 :])


CURVES: Mapping[str, Callable[[Places], Curve]] = {
    "prompts": prompts,
    "in-flight": in_flight,
    "steps": steps,
    "stored": stored,
    "workers": workers,
}
