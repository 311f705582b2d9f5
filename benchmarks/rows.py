"""The rows of the table of targets, one function each."""

import asyncio
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import redis

from benchmarks import exporting, load, upstream
from benchmarks.servers import Server, serving, started
from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.trajectory.codec import encode
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Choice, EngineFacts, Span, Step, Timing
from storage import open_store
from storage.types import StepWrite

ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One row: `reached` is the share of the target that was reached; 1 or more meets it."""

    what: str
    target: str
    measured: str
    reached: float

    @property
    def is_met(self) -> bool:
        return self.reached >= 1


def at_most(limit: float, measured: float) -> float:
    """Return the share of an upper bound that was reached; at most 10, for values too small to measure."""
    return limit / max(measured, limit / 10)


@dataclass(frozen=True)
class Places:
    """The running servers: the engine, and the two proxies in front of it."""

    direct: Server
    bare: Server
    tokentape: Server


def throughput_row(places: Places, what: str, mode: str, target: float, calls: int) -> Row:
    """Measure the median ratio of alternating rounds of bare and TokenTape."""
    ratios, rates = [], []
    for _ in range(ROUNDS):
        bare = asyncio.run(load.throughput(places.bare.port, mode, clients=16, calls=calls))
        ours = asyncio.run(load.throughput(places.tokentape.port, mode, clients=16, calls=calls))
        ratios.append(ours / bare)
        rates.append(ours)
    ratio = median(ratios)
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return Row(
        what, f">= {target:.2f} x bare", f"{ratio:.2f} x ({spread}; {median(rates):.0f} calls/s)", ratio / target
    )


def paced_row(places: Places, calls: int = 160) -> Row:
    """Measure the CPU time of streams whose events arrive one by one, relative to bare."""
    ratios, costs = [], []
    for _ in range(ROUNDS):
        used = [_processor_s(server, "paced", calls) for server in (places.bare, places.tokentape)]
        ratios.append(used[1] / used[0])
        costs.append(used[1] / calls * 1e6)
    ratio = median(ratios)
    return Row(
        "CPU time of a paced stream of 200 events, 16 clients",
        "<= 2.0 x bare",
        f"{ratio:.2f} x ({min(ratios):.2f}-{max(ratios):.2f}; {median(costs):.0f} µs)",
        at_most(2.0, ratio),
    )


def _processor_s(server: Server, mode: str, calls: int) -> float:
    before = server.processor_s()
    asyncio.run(load.throughput(server.port, mode, clients=16, calls=calls))
    return server.processor_s() - before


def long_row(places: Places) -> Row:
    """Measure unstreamed calls with long prompts."""
    return throughput_row(places, "unstreamed chat, 128,000 + 200 tokens, 16 clients", "whole-128000", 0.40, 320)


def latency_rows(places: Places) -> list[Row]:
    """Measure the latency that TokenTape adds to bare, with one client."""
    whole, first = [], []
    for _ in range(ROUNDS):
        bare = asyncio.run(load.latency(places.bare.port, "whole", calls=100))[0]
        ours = asyncio.run(load.latency(places.tokentape.port, "whole", calls=100))[0]
        whole.append(ours - bare)
        bare = asyncio.run(load.latency(places.bare.port, "stream", calls=60))[1]
        ours = asyncio.run(load.latency(places.tokentape.port, "stream", calls=60))[1]
        first.append(ours - bare)
    whole_ms, first_ms = median(whole) * 1000, median(first) * 1000
    return [
        Row("added latency, one client, unstreamed, median", "<= 1 ms", f"{whole_ms:.2f} ms", at_most(1, whole_ms)),
        Row(
            "added time to first token, one client, streamed, median",
            "<= 0.5 ms",
            f"{first_ms:.2f} ms",
            at_most(0.5, first_ms),
        ),
    ]


def at_once_row(places: Places, calls: int = 2_000) -> Row:
    """Measure concurrent slow calls, relative to the same calls without a proxy."""
    direct, _ = asyncio.run(load.at_once(places.direct.port, "slow", calls))
    ours, succeeded = asyncio.run(load.at_once(places.tokentape.port, "slow", calls))
    measured = f"{succeeded} of {calls}, {ours / direct:.2f} x direct"
    reached = at_most(1.2, ours / direct) if succeeded == calls else 0.0
    return Row(f"{calls:,} concurrent calls of {upstream.SLOW_S:.0f} s", "all, <= 1.2 x direct", measured, reached)


def memory_row(places: Places, streams: int = 1_000) -> Row:
    """Measure the memory per stream that is open half-way."""

    async def open_streams() -> int:
        clients = [await load.connect(places.tokentape.port) for _ in range(streams)]
        before = places.tokentape.resident_bytes()
        calls = [client.call(load.request_for("hang", f"open-{n}")) for n, client in enumerate(clients)]
        while any(not client.first for client in clients):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        grown = places.tokentape.resident_bytes() - before
        for client in clients:
            client.transport.close()
        await asyncio.gather(*calls, return_exceptions=True)
        return grown

    per_stream = asyncio.run(open_streams()) / streams / 1000
    return Row(
        "resident memory per open streamed call",
        "<= 150 kB",
        f"{per_stream:.0f} kB (over {streams:,})",
        at_most(150, per_stream),
    )


def conversation(turns: int, tokens: int, rollout: str) -> list[Step]:
    """Return the steps of a rollout with equal turns that grows to `tokens` tokens; half of each turn is sampled."""
    chance = random.Random(rollout)
    grows = tokens // turns // 2
    ids: list[int] = []
    messages: list[dict] = []
    steps = []
    for turn in range(turns):
        ids += [chance.randrange(150_000) for _ in range(grows)]
        text = " ".join(f"w{chance.randrange(5000)}" for _ in range(grows * 3 // 4))
        messages = [*messages, {"role": "user", "content": text}]
        sampled = array("i", [chance.randrange(150_000) for _ in range(grows)])
        logprobs = array("f", [-chance.expovariate(1.0) for _ in sampled])
        reply = {"role": "assistant", "content": " ".join(f"v{chance.randrange(5000)}" for _ in range(grows * 3 // 4))}
        steps.append(
            Step(
                step_id=f"{turn:026d}",
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
    return steps


def storage_row(rollouts: int = 8) -> Row:
    """Measure the memory of the store for 50-turn rollouts of 32k tokens, with keys, names and overhead."""

    async def stored() -> float:
        with tempfile.TemporaryDirectory() as folder:
            store = await open_store(f"embedded:{folder}/store")
            with redis.Redis(unix_socket_path=f"{folder}/store/valkey.sock") as server:
                before = server.info("memory")["used_memory_dataset"]
                for number in range(rollouts):
                    known: set[bytes] = set()
                    name = f"r{number}"
                    incarnation = (await store.open(name, {}, now_ms=1)).incarnation
                    for step in conversation(50, 32_000, name):
                        record = encode(step, known)
                        known |= {*record.blocks, *record.names}
                        entry = StepWrite(
                            name, incarnation, step.step_id, record.record, record.blocks, record.leans_on, {"steps": 1}
                        )
                        await store.append(entry, now_ms=1)
                grown = server.info("memory")["used_memory_dataset"] - before
            await store.close()
        return grown / (rollouts * 32_000)

    per_token = asyncio.run(stored())
    return Row(
        "storage of a 50-turn rollout that grows to 32k tokens",
        "<= 16 B/token",
        f"{per_token:.1f} B/token",
        at_most(16, per_token),
    )


def export_row(rollouts: int = 1_000, tokens: int = 8_000) -> Row:
    """Measure joining and writing rows of long rollouts from steps in memory, without the import of pyarrow."""
    steps = conversation(20, tokens, "r")
    form = FORMATS["sequences"]
    writer = CONTAINERS["arrow"].writer(form)
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
        steps = conversation(20, tokens, "r")
        asyncio.run(exporting.fill(Path(folder) / "store/valkey.sock", rollouts, steps))
        rates = []
        for _ in range(3):
            started_at = time.perf_counter()
            asyncio.run(exporting.export(server, "arrow"))
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
        asyncio.run(exporting.fill(Path(folder) / "store/valkey.sock", rollouts, conversation(4, 2_000, "r")))
        measured = [(name, *asyncio.run(exporting.export(server, name))) for name in ("ndjson", "arrow", "parquet")]
    what = f"export of {rollouts:,} rollouts x 2k tokens, {{}}: peak resident memory"
    return [
        Row(what.format(name), "<= 200 MB", f"{peak / 1e6:.0f} MB (of {length / 1e6:.0f} MB)", at_most(200e6, peak))
        for name, length, peak in measured
    ]


def rows_of_two(places: Places) -> list[Row]:
    """Measure the rows that depend on the number of processes, with two workers; bare has one process."""
    two = ", --workers 2"
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(places.direct.url, folder, 2) as server,
    ):
        shared = replace(places, tokentape=server)
        return [
            replace(row, what=row.what + two)
            for row in (unstreamed_row(shared), streamed_row(shared), at_once_row(shared))
        ]


def unstreamed_row(places: Places) -> Row:
    """Measure unstreamed calls."""
    return throughput_row(places, "unstreamed chat, 1,000 + 200 tokens, 16 clients", "whole", 0.50, 1600)


def streamed_row(places: Places) -> Row:
    """Measure streamed calls."""
    return throughput_row(places, "streamed chat, a burst of 200 events, 16 clients", "stream", 0.40, 320)


def rows(places: Places) -> list[Callable[[], list[Row]]]:
    """Return the functions that measure the rows, in the order of the table."""
    return [
        lambda: [unstreamed_row(places)],
        lambda: [streamed_row(places)],
        lambda: [paced_row(places)],
        lambda: [long_row(places)],
        lambda: latency_rows(places),
        lambda: [at_once_row(places)],
        lambda: rows_of_two(places),
        lambda: [memory_row(places)],
        lambda: [storage_row()],
        lambda: [export_row(), export_whole_row(places)],
        lambda: export_memory_rows(places),
    ]
