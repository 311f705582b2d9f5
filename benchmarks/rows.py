"""The rows of the table of targets, each with a name on the command line."""

import asyncio
import random
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import redis

from benchmarks import load, upstream
from benchmarks.load import Calls, chat, translated
from benchmarks.servers import Server, serving, started
from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Choice, EngineFacts, Span, Step, Timing
from storage import open_store

ROUNDS = 15  # short ones: other work on the machine disturbs both parts of a pair


@dataclass(frozen=True)
class Row:
    """One row: `reached` is the share of the target that was reached; 1 or more meets it.

    `cpu`: the CPU time of a call in TokenTape's process, in its store's, and in bare's. `old`: the same compared with another
    checkout.
    """

    what: str
    target: str
    measured: str
    reached: float
    cpu: str = ""
    old: str = ""

    @property
    def is_met(self) -> bool:
        return self.reached >= 1


def at_most(limit: float, measured: float) -> float:
    """Return the share of an upper bound that was reached; at most 10, for values too small to measure."""
    return limit / max(measured, limit / 10)


@dataclass(frozen=True)
class Places:
    """The running servers: the engine, the two proxies in front of it, and a TokenTape of another checkout."""

    direct: Server
    bare: Server
    tokentape: Server
    old: Server | None = None


class Run(NamedTuple):
    """One run of a load: calls per second, and the CPU time per call of the proxy and of its store, in µs."""

    rate: float
    proxy_us: float
    store_us: float


def run(server: Server, calls: Calls, clients: int, rollouts: int) -> Run:
    """Send a load once, and measure it."""
    before = server.processor_s()
    rate = asyncio.run(load.throughput(server.port, calls, clients=clients, rollouts=rollouts))
    total = clients * rollouts * len(calls.bodies) / 1e6
    return Run(rate, *((after - used) / total for used, after in zip(before, server.processor_s(), strict=True)))


@dataclass(frozen=True)
class Load:
    """What a row of throughput sends to both proxies, or another load to bare."""

    what: str
    calls: Calls
    rollouts: int  # of each client in a round
    clients: int = 16
    to_bare: Calls | None = None


def rounds(places: Places, sent: Load) -> dict[str, list[Run]]:
    """Return paired runs by server, after one that is not counted; every second round is in reverse order."""
    servers = {"bare": places.bare, "old": places.old, "ours": places.tokentape}
    turns = [(name, server) for name, server in servers.items() if server is not None]
    runs: dict[str, list[Run]] = {name: [] for name, _ in turns}
    for number in range(ROUNDS + 1):
        for name, server in turns if number % 2 else turns[::-1]:
            calls = sent.to_bare if name == "bare" and sent.to_bare else sent.calls
            runs[name].append(run(server, calls, sent.clients, sent.rollouts if number else 1))
    return {name: all_[1:] for name, all_ in runs.items()}


def _ratios(these: Sequence[Run], those: Sequence[Run], value: Callable[[Run], float]) -> list[float]:
    return [value(a) / value(b) for a, b in zip(these, those, strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} x ({min(ratios):.2f}-{max(ratios):.2f})"


def _rate(measured: Run) -> float:
    return measured.rate


def _proxy_us(measured: Run) -> float:
    return measured.proxy_us


def _compared(runs: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Return the columns of CPU times, and of the comparison with another checkout."""
    proxy, store = (median(run[which] for run in runs["ours"]) for which in (1, 2))
    columns = {"cpu": f"{proxy:,.0f} + {store:,.0f} ({median(run.proxy_us for run in runs['bare']):,.0f})"}
    if "old" in runs:
        rates, costs = (_ratios(runs["ours"], runs["old"], value) for value in (_rate, _proxy_us))
        stores = [(a.store_us + 1) / (b.store_us + 1) for a, b in zip(runs["ours"], runs["old"], strict=True)]
        columns["old"] = f"{_spread(rates)}; CPU {median(costs):.2f} + {median(stores):.2f} x"
    return columns


def throughput_row(places: Places, sent: Load, target: float) -> Row:
    """Measure the median ratio of calls per second."""
    runs = rounds(places, sent)
    ratios = _ratios(runs["ours"], runs["bare"], _rate)
    measured = f"{_spread(ratios)}; {median(run.rate for run in runs['ours']):,.0f} calls/s"
    return Row(sent.what, f">= {target:.2f} x bare", measured, median(ratios) / target, **_compared(runs))


def paced_row(places: Places) -> Row:
    """Measure the CPU time of streams with events that arrive one by one."""
    sent = Load("CPU time of a stream with an event each 8 ms, 16 clients", chat("paced", 1), 1)
    runs = rounds(places, sent)
    ratios = _ratios(runs["ours"], runs["bare"], _proxy_us)
    return Row(sent.what, "<= 1.2 x bare", _spread(ratios), at_most(1.2, median(ratios)), **_compared(runs))


def latency_rows(places: Places) -> list[Row]:
    """Measure the latency that TokenTape adds to bare, with one client."""
    rows = []
    for what, mode, which, limit in (("latency", "whole", 0, 0.7), ("time to first token", "stream", 1, 0.4)):
        added: dict[str, list[float]] = {"ours": [], "old": []}
        for _ in range(ROUNDS):
            bare, ours, old = (
                1000 * asyncio.run(load.latency(server.port, mode, calls=40))[which] if server else 0.0
                for server in (places.bare, places.tokentape, places.old)
            )
            added["ours"].append(ours - bare)
            added["old"].append(old - bare)
        ours, old = (median(differences) for differences in added.values())
        compared = f"{ours / old:.2f} x of {old:.2f} ms" if places.old else ""
        title = f"added {what}, one client, {'streamed' if which else 'unstreamed'}, median"
        rows.append(Row(title, f"<= {limit} ms", f"{ours:.2f} ms", at_most(limit, ours), old=compared))
    return rows


def at_once_row(places: Places, calls: int = 2_000) -> Row:
    """Measure concurrent slow calls, relative to the same calls without a proxy."""
    direct, _ = asyncio.run(load.at_once(places.direct.port, "slow", calls))
    ours, succeeded = asyncio.run(load.at_once(places.tokentape.port, "slow", calls))
    measured = f"{succeeded} of {calls}, {ours / direct:.2f} x direct"
    reached = at_most(1.2, ours / direct) if succeeded == calls else 0.0
    return Row(f"{calls:,} concurrent calls of {upstream.SLOW_S:.0f} s", "all, <= 1.2 x direct", measured, reached)


def memory_row(places: Places, streams: int = 1_000) -> Row:
    """Measure the memory per stream that is open half-way, in a new process: others have freed memory that is used first."""

    async def grown(server: Server) -> int:
        clients = [await load.connect(server.port) for _ in range(streams)]
        before = server.resident_bytes()
        calls = [client.call(chat("hang").request(0, f"open-{n}")) for n, client in enumerate(clients)]
        while any(not client.first for client in clients):
            await asyncio.sleep(0.05)
        await asyncio.sleep(2 * upstream.HALF_WAY_S)
        after = server.resident_bytes()
        for client in clients:
            client.transport.close()
        await asyncio.gather(*calls, return_exceptions=True)
        return after - before

    with (
        tempfile.TemporaryDirectory() as folder,
        started("bare", places.direct.url) as bare,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as ours,
    ):
        for server in (bare, ours):
            run(server, chat("stream"), 16, 1)
        alone, per_stream = (asyncio.run(grown(server)) / streams / 1000 for server in (bare, ours))
    return Row(
        "resident memory per open streamed call",
        "<= 60 kB",
        f"{per_stream:.0f} kB (over {streams:,}; bare {alone:.0f} kB)",
        at_most(60, per_stream),
    )


def conversation(turns: int, tokens: int, rollout: str) -> Iterator[Step]:
    """Yield the steps of a rollout with equal turns that grows to `tokens` tokens; half of each turn is sampled."""
    chance = random.Random(rollout)
    grows = tokens // turns // 2
    ids: list[int] = []
    messages: list[dict] = []
    for turn in range(turns):
        ids += [chance.randrange(150_000) for _ in range(grows)]
        text = " ".join(f"w{chance.randrange(5000)}" for _ in range(grows * 3 // 4))
        messages = [*messages, {"role": "user", "content": text}]
        sampled = array("i", [chance.randrange(150_000) for _ in range(grows)])
        logprobs = array("f", [-chance.expovariate(1.0) for _ in sampled])
        reply = {"role": "assistant", "content": " ".join(f"v{chance.randrange(5000)}" for _ in range(grows * 3 // 4))}
        yield (
            Step(
                step_id=f"01M8EMMB3Y7S02XK2J7J{turn:06d}",
                rollout_id=rollout,
                dialect="chat",
                endpoint="/v1/chat/completions",
                engine=EngineFacts("e", "vllm", "0.32.0", "http://e"),
                model_asked="m",
                model_served="m",
                request={"model": "m", "messages": messages, "temperature": 1.0},
                sent={"set": {"return_token_ids": True, "logprobs": True}, "unset": []},
                response={"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]},
                prompts=(array("i", ids),),
                choices=(Choice(0, sampled, logprobs, "stop", None, 0, (Span(0, len(sampled)),)),),
                usage={"prompt_tokens": len(ids), "completion_tokens": grows},
                sampling={"temperature": 1.0},
                timing=Timing(1.0, 1.0, 1.0, 1.0, 1.0),
                status="complete",
                extra={"request_key": str(turn)},
            )
        )
        ids += sampled.tolist()
        messages = [*messages, reply]


def storage_row(rollouts: int = 8) -> Row:
    """Measure the memory of the store for 50-turn rollouts of 32k tokens, with keys, names and overhead."""

    async def stored() -> float:
        with tempfile.TemporaryDirectory() as folder:
            store = await open_store(f"embedded:{folder}/store")
            socket = Path(folder) / "store/valkey.sock"
            with redis.Redis(unix_socket_path=str(socket)) as server:
                before = server.info("memory")["used_memory_dataset"]
                for number in range(rollouts):
                    await load.fill(socket, 1, conversation(50, 32_000, f"r{number}"), first=number)
                grown = server.info("memory")["used_memory_dataset"] - before
            await store.close()
        return grown / (rollouts * 32_000)

    per_token = asyncio.run(stored())
    return Row(
        "storage of a 50-turn rollout that grows to 32k tokens",
        "<= 14 B/token",
        f"{per_token:.1f} B/token",
        at_most(14, per_token),
    )


def export_row(rollouts: int = 1_000, tokens: int = 8_000) -> Row:
    """Measure joining and writing rows of long rollouts from steps in memory, without the import of pyarrow."""
    steps = list(conversation(20, tokens, "r"))
    form = FORMATS["sequences"]
    writer = CONTAINERS["arrow"](form)
    started_at = time.process_time()
    for number in range(rollouts):
        copies = [replace(step, rollout_id=f"r{number}") for step in steps]
        plan = form.plan(RolloutFacts(f"r{number}"), copies, Options())
        for row in (plan.pack or plan.render)():  # as `GET /export` does
            writer.row(row)
    writer.closing(None)
    rate = rollouts * tokens / (time.process_time() - started_at) / 1e6
    return _rate_row("from steps in memory", rollouts, rate)


def export_whole_row(places: Places, rollouts: int = 1_000, tokens: int = 8_000) -> Row:
    """Measure the same export by `GET /export`, including reads from the store."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        steps = list(conversation(20, tokens, "r"))
        asyncio.run(load.fill(Path(folder) / "store/valkey.sock", rollouts, steps))
        rates = []
        for _ in range(3):
            started_at = time.perf_counter()
            asyncio.run(load.export(server, "arrow"))
            rates.append(rollouts * tokens / (time.perf_counter() - started_at) / 1e6)
    return _rate_row("by GET /export, from the store", rollouts, median(rates))


def _rate_row(how: str, rollouts: int, rate: float) -> Row:
    what = f"export of {rollouts:,} rollouts x 8k tokens (sequences, arrow), {how}"
    return Row(what, ">= 5 M tokens/s", f"{rate:.1f} M tokens/s", rate / 5)


def export_memory_rows(places: Places, rollouts: int = 10_000) -> list[Row]:
    """Measure the peak memory of exports of rollouts with four turns and 2k tokens."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        asyncio.run(load.fill(Path(folder) / "store/valkey.sock", rollouts, list(conversation(4, 2_000, "r"))))
        measured = [(name, *asyncio.run(load.export(server, name))) for name in ("ndjson", "arrow", "parquet")]
    what = f"export of {rollouts:,} rollouts x 2k tokens, {{}}: peak resident memory"
    return [
        Row(what.format(name), "<= 200 MB", f"{peak / 1e6:.0f} MB (of {length / 1e6:.0f} MB)", at_most(200e6, peak))
        for name, length, peak in measured
    ]


def playback_rows(places: Places, steps: int = 10_000, calls: int = 50) -> list[Row]:
    """Measure the first call of a long playback, and calls of a short one with one client."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", places.direct.url, f"embedded:{folder}/store") as server,
    ):
        socket = Path(folder) / "store/valkey.sock"
        short = list(conversation(calls, 32_000, "short"))
        asyncio.run(load.fill(socket, 1, short, first=0))
        asyncio.run(load.fill(socket, 1, conversation(steps, 8 * steps, "long"), first=1))
        first = next(conversation(steps, 8 * steps, "long")).request
        asyncio.run(load.play(server, "r0", "warm", [step.request for step in short]))
        before = server.processor_s()[0]
        asyncio.run(load.play(server, "r1", "opened", []))
        between = server.processor_s()[0]
        asyncio.run(load.play(server, "r1", "played", [first]))
        cpu_s = server.processor_s()[0] - between - (between - before)  # of the call, without that of its opening
        taken = asyncio.run(load.play(server, "r0", "again", [step.request for step in short]))
    long = f"first call of a playback of {steps:,} steps, CPU time"
    return [
        Row(long, "<= 1 s", f"{cpu_s:.2f} s (opening: {between - before:.2f} s)", at_most(1, cpu_s)),
        Row(
            f"call of a playback of {calls} steps that grows to 32k tokens, one client, median",
            "<= 3 ms",
            f"{1000 * median(taken):.1f} ms",
            at_most(3, 1000 * median(taken)),
        ),
    ]


def worker_rows(places: Places) -> list[Row]:
    """Measure the rows that depend on the number of processes, with two workers; bare has one process."""
    with tempfile.TemporaryDirectory() as folder, serving(places.direct.url, folder, 2) as server:
        shared = replace(places, tokentape=server, old=None)
        measured = [throughput_row(shared, *LOADS[name]) for name in ("unstreamed", "burst")]
        return [replace(row, what=f"{row.what}, --workers 2") for row in (*measured, at_once_row(shared))]


def _turns(what: str, grows: int, mode: str) -> Load:
    return Load(f"conversation of 20 turns, {what} tokens, {mode}", load.conversation(grows, grows, 20, mode), 1)


def _translated(dialect: str, path: str) -> Load:
    return Load(
        f"streamed {dialect} over the engine's chat stream, a burst", translated(path), 1, to_bare=chat("stream")
    )


# name: the load and its target
LOADS: Mapping[str, tuple[Load, float]] = {
    "unstreamed": (Load("unstreamed chat, 1,000 + 200 tokens, 16 clients", chat("whole"), 2), 0.42),
    "burst": (Load("streamed chat, a burst of 200 events, 16 clients", chat("stream"), 1), 0.55),
    "conversation": (_turns("1k to 20k", 1_000, "faithful"), 0.25),
    "conversation-off": (_turns("1k to 20k", 1_000, "off"), 0.43),
    "growing": (_turns("6k to 128k", 6_400, "off"), 0.35),
    "long": (
        Load(
            "unstreamed, 128k tokens, ten calls of one rollout together", chat("whole-128000", are_together=True), 8, 1
        ),
        0.25,
    ),
    "messages": (_translated("Messages", "/v1/messages"), 0.40),
    "responses": (_translated("Responses", "/v1/responses"), 0.40),
}

# name: what measures its rows
ROWS: Mapping[str, Callable[[Places], list[Row]]] = {
    **{
        name: partial(lambda places, sent, target: [throughput_row(places, sent, target)], sent=sent, target=target)
        for name, (sent, target) in LOADS.items()
    },
    "paced": lambda places: [paced_row(places)],
    "latency": latency_rows,
    "at-once": lambda places: [at_once_row(places)],
    "workers": worker_rows,
    "memory": lambda places: [memory_row(places)],
    "storage": lambda _: [storage_row()],
    "playback": playback_rows,
    "export": lambda places: [export_row(), export_whole_row(places)],
    "export-memory": export_memory_rows,
}
