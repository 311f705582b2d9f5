"""CPU time of a call by stage, in one process without sockets and store, with one response repeated.

Each stage calls the proxy's own functions for all events of the response. `whole` feeds the same bytes to an `Exchange` and
encodes its step; `rest` is the difference between the whole and the sum of the stages.
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
from proxy.protocols.exchange import Exchange, pack_tokens
from proxy.protocols.lenient_json import read_json, write_json
from proxy.protocols.plan import CallOptions, Plan, make_plan
from proxy.protocols.sse import EventParser
from proxy.trajectory import fidelity
from proxy.trajectory.codec import encode
from proxy.trajectory.step import EngineFacts, Step, Timing

ROUNDS, REPEATS = 7, 20
PATH = "/v1/chat/completions"
KINDS = {True: "text/event-stream; charset=utf-8", False: "application/json"}


@dataclass(frozen=True)
class Costs:
    """CPU time per call in µs: by stage, and of the whole."""

    stages: dict[str, float]
    whole: float

    @property
    def rest(self) -> float:
        """The whole without the stages."""
        return self.whole - sum(self.stages.values())


def planned(*, streamed: bool) -> Plan:
    """Return the plan of a call without options."""
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
        exchange.response.feed(read)
    return exchange.finish(Timing(received=1.0)).step


def _seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of one run: the minimum of several rounds."""
    rounds = []
    gc.collect()
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(REPEATS):
            run()
        rounds.append((time.process_time() - started) / REPEATS)
    return min(rounds)


def costs(*, streamed: bool) -> Costs:
    """Measure a streamed or an unstreamed call by stage."""
    plan = planned(streamed=streamed)
    reads = upstream.events() if streamed else [upstream.whole()]
    step = _exchanged(plan, reads, streamed=streamed)
    payloads = [read[6:-2] for read in reads[:-1]] if streamed else reads
    chunks = [orjson.loads(payload) for payload in payloads]
    show = plan.view.chunk if streamed else plan.view.whole
    shown = [visible for chunk in chunks if (visible := show(chunk)) is not None]
    response = _accumulated(plan, chunks) if streamed else chunks[0]
    evidence = fidelity.Evidence(step.prompts, step.choices, step.usage, 1, ended=True, status="complete")
    stages: dict[str, Callable[[], object]] = {
        "parse: bytes to events": lambda: _parsed(reads),
        "loads: events to objects": lambda: [read_json(payload) for payload in payloads],
        "accumulate: events to one response": lambda: _accumulated(plan, chunks),
        "view: events for the client": lambda: [show(chunk) for chunk in chunks],
        "dumps: objects to bytes": lambda: [write_json(chunk, loosely=False) for chunk in shown],
        "pack: ids and logprobs as arrays": lambda: _packed(plan, response),
        "check: fidelity of the step": lambda: fidelity.check(evidence),
        "encode: the step as a record": lambda: encode(step),
    }
    if not streamed:
        stages = {name: run for name, run in stages.items() if not name.startswith(("parse", "accumulate"))}
    measured = {name: _seconds(run) * 1e6 for name, run in stages.items()}
    whole = _seconds(lambda: encode(_exchanged(plan, reads, streamed=streamed))) * 1e6
    return Costs(measured, whole)


def _parsed(reads: list[bytes]) -> None:
    parser = EventParser()
    for read in reads:
        parser.feed(read)


def _accumulated(plan: Plan, chunks: list[Any]) -> dict[str, Any]:
    accumulator = plan.dialect.accumulator()
    for chunk in chunks:
        accumulator.feed(chunk)
    return accumulator.finish()


def _packed(plan: Plan, response: dict[str, Any]) -> object:
    return pack_tokens(plan.engine.tokens(plan.dialect.name, plan.body, response), 1, None)
