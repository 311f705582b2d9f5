"""Cassettes: requests and answers recorded from real engines, and how tests play them to an exchange."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import orjson

from proxy.clock import SystemClock
from proxy.dialects import DIALECTS
from proxy.engines import ENGINES
from proxy.trajectory.step import EngineFacts, Step, Timing
from proxy.wire.exchange import Exchange
from proxy.wire.plan import Plan, Terms, make_plan

ROOT = Path(__file__).parent.parent / "cassettes" / "vllm-0.32"
CLOCK = SystemClock()


@dataclass(frozen=True)
class Cassette:
    """One recorded exchange. `answer` is the body as the engine sent it."""

    name: str
    path: str
    body: dict
    answer: bytes
    status: int
    content_type: str

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    def __str__(self) -> str:
        return self.name


CONTENT_TYPES = {".json": "application/json", ".sse": "text/event-stream; charset=utf-8", ".txt": "text/plain"}


def load(name: str) -> Cassette:
    """The cassette of this name, such as `pairs_hermes/chat_eos_n_inj`."""
    request = orjson.loads((ROOT / f"{name}.request.json").read_bytes())
    answer = next(ROOT.glob(f"{name}.response.*"))
    meta = ROOT / f"{name}.meta.json"
    status = orjson.loads(meta.read_bytes())["status"] if meta.exists() else 200
    return Cassette(
        name, request["path"], request.get("body"), answer.read_bytes(), status, CONTENT_TYPES[answer.suffix]
    )


def names(pattern: str = "**/*") -> list[str]:
    """The names of all cassettes that match, sorted."""
    found = ROOT.glob(f"{pattern}.request.json")
    return sorted(str(path.relative_to(ROOT)).removesuffix(".request.json") for path in found)


def dialect_cassettes() -> list[Cassette]:
    """Every cassette of a native dialect with a JSON body."""
    return [cassette for name in names() if (cassette := load(name)).path in DIALECTS and cassette.body is not None]


def plan_of(path: str, body: dict, terms: Terms | None = None) -> Plan:
    """The plan of a call to vLLM."""
    return make_plan(
        body,
        terms=terms or Terms(),
        step_id="S1",
        rollout_id="r1",
        endpoint=path,
        dialect=DIALECTS[path],
        engine=ENGINES["vllm"],
        engine_facts=EngineFacts("e", "vllm", "0.32.0", "http://e"),
        logprobs_mode="raw_logprobs",
    )


def play(plan: Plan, cassette: Cassette, reads: Iterable[bytes] | None = None) -> tuple[bytes, bytes, Step]:
    """Feed an answer: the bytes shown at once, the withheld end, and the step."""
    exchange = Exchange(plan, cassette.status, cassette.content_type)
    shown = b"".join([exchange.feed(read) for read in ([cassette.answer] if reads is None else reads)])
    outcome = exchange.finish(Timing(received=1.0))
    return shown, outcome.end, outcome.step


def cut(text: bytes, sizes: Iterable[int]) -> list[bytes]:
    """The bytes in pieces of these sizes, the last one being the rest."""
    pieces, position = [], 0
    for size in sizes:
        pieces.append(text[position : position + size])
        position += size
    return [*pieces, text[position:]]
