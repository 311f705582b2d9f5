"""What a call costs by stage, in this process alone: no sockets, no store, one recorded answer over and over.

Each stage is done by the functions that the proxy itself calls, for all events of the answer, and measured apart; `whole` is
an `Exchange` fed the same bytes, its step encoded. What the stages do not explain of the whole is told as `the rest`.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks import upstream
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.exchange import Exchange
from proxy.protocols.lenient_json import read_json, write_json
from proxy.protocols.plan import CallOptions, Plan, make_plan
from proxy.protocols.response_validation import pack_tokens
from proxy.protocols.sse import EventParser
from proxy.trajectory import fidelity
from proxy.trajectory.codec import encode
from proxy.trajectory.step import EngineFacts, Step, Timing

ROUNDS, REPEATS = 7, 20
PATH = "/v1/chat/completions"
KINDS = {True: "text/event-stream; charset=utf-8", False: "application/json"}


@dataclass(frozen=True)
class Costs:
    """Microseconds of processor time a call, by stage; `whole` is all of it."""

    stages: dict[str, float]
    whole: float

    @property
    def rest(self) -> float:
        """What no stage explains."""
        return self.whole - sum(self.stages.values())


def planned(*, streamed: bool) -> Plan:
    """The plan of a call by a client that asks for nothing."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "word " * 200}]}
    if streamed:
        body["stream"] = True
    return make_plan(
        body,
        options=CallOptions(),
        step_id="0" * 26,
        rollout_id="r1",
        endpoint=PATH,
        dialect=DIALECTS[PATH],
        engine=ENGINES["vllm"],
        engine_facts=EngineFacts("e", "vllm", "0.32.0", "http://e"),
        logprobs_mode=None,
    )


def _exchanged(plan: Plan, reads: list[bytes], *, streamed: bool) -> Step:
    exchange = Exchange(plan, 200, KINDS[streamed])
    for read in reads:
        exchange.feed(read)
    return exchange.finish(Timing(received=1.0)).step


def _seconds(run: Callable[[], object]) -> float:
    """Processor time of one run: the least of some rounds, in which nothing else happened to this process."""
    rounds = []
    gc.collect()
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(REPEATS):
            run()
        rounds.append((time.process_time() - started) / REPEATS)
    return min(rounds)


def costs(*, streamed: bool) -> Costs:
    """What a streamed or an unstreamed call costs by stage."""
    plan = planned(streamed=streamed)
    reads = upstream.events() if streamed else [upstream.whole()]
    step = _exchanged(plan, reads, streamed=streamed)
    payloads = [read[6:-2] for read in reads[:-1]] if streamed else reads
    chunks = [orjson.loads(payload) for payload in payloads]
    show = plan.view.chunk if streamed else plan.view.whole
    shown = [told for chunk in chunks if (told := show(chunk)) is not None]
    response = _folded(plan, chunks) if streamed else chunks[0]
    evidence = fidelity.Evidence(step.prompts, step.choices, step.usage, 1, ended=True, status="complete")
    stages: dict[str, Callable[[], object]] = {
        "cut: bytes into events": lambda: _cut(reads),
        "loads: events into objects": lambda: [read_json(payload) for payload in payloads],
        "fold: events into one response": lambda: _folded(plan, chunks),
        "view: what the client may see": lambda: [show(chunk) for chunk in chunks],
        "dumps: objects into bytes": lambda: [write_json(each, loosely=False) for each in shown],
        "pack: ids and logprobs as arrays": lambda: _packed(plan, response),
        "check: whether the step is exact": lambda: fidelity.check(evidence),
        "encode: the step as a record": lambda: encode(step),
    }
    if not streamed:
        stages = {name: run for name, run in stages.items() if not name.startswith(("cut", "fold"))}
    measured = {name: _seconds(run) * 1e6 for name, run in stages.items()}
    whole = _seconds(lambda: encode(_exchanged(plan, reads, streamed=streamed))) * 1e6
    return Costs(measured, whole)


def _cut(reads: list[bytes]) -> None:
    cutter = EventParser()
    for read in reads:
        cutter.feed(read)


def _folded(plan: Plan, chunks: list[Any]) -> dict[str, Any]:
    fold = plan.dialect.accumulator()
    for chunk in chunks:
        fold.feed(chunk)
    return fold.finish()


def _packed(plan: Plan, response: dict[str, Any]) -> object:
    return pack_tokens(plan.engine.tokens(plan.dialect.name, plan.body, response), 1, None)
