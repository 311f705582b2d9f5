"""Calls to faulty engines, drawn from a seed: the request, the sampled tokens, and the faults of the response.

`drawn(seed)` returns a `FaultyCall`. Each fault has its own seed, so a call with fewer faults is otherwise the same;
`least` uses this to find the faults that matter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from struct import pack, unpack
from typing import Any

import orjson
from tests.support.engine_faults import FAULTS, Fault
from tests.support.faulty_engine import Drawn, EngineRequest, Truth, Written, write_response
from tests.support.recorded import cut, plan_of

from proxy.protocols.engines.base import CallOptions, Traits
from proxy.protocols.plan import Plan

Json = dict[str, Any]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/inference/v1/generate"}
KINDS = ("vllm",) * 5 + ("sglang",) * 3 + ("llamacpp",) * 2
ENDS = (b"\n\n",) * 6 + (b"\r\n\r\n", b"\r\r")
MANY = "max_tokens"


@dataclass(frozen=True)
class FaultyCall:
    """A call, the truth of its response, and the faults of the engine. `headers` are the agent's."""

    seed: int
    kind: str
    dialect: str
    body: Json
    truth: Truth
    streaming: str
    faults: tuple[tuple[str, int], ...]
    cut: int | None = None
    reads: tuple[int, ...] = ()
    end: bytes = b"\n\n"
    over: bool = False
    used: list[str] = field(default_factory=list, compare=False)

    @property
    def path(self) -> str:
        return PATHS[self.dialect]

    def plan(self) -> Plan:
        """Return TokenTape's plan for it."""
        traits = Traits(self.kind, {"vllm": "0.32.0", "sglang": "0.5.23", "llamacpp": "b1"}[self.kind], has_parser=True)
        return plan_of(self.path, self.body, CallOptions(streaming=self.streaming), kind=self.kind, traits=traits)

    def response_to(self, body: Json) -> tuple[bytes, str]:
        """Return what the engine sends for a body, and its content type. `used` gets the faults that changed something."""
        request = EngineRequest(self.kind, self.dialect, body)
        written = write_response(request, self.truth, Random(self.seed))
        self.used[:] = [name for name, seed in self.faults if _apply(FAULTS[name], written, request, seed)]
        text = serialized(written, self.end)
        text = text if self.cut is None else text[: self.cut % (len(text) + 1)]
        return text, "text/event-stream; charset=utf-8" if written.is_stream else "application/json"

    def in_reads(self, text: bytes) -> list[bytes]:
        """Split the response into its reads."""
        return cut(text, self.reads)


def drawn(seed: int, most_faults: int = 3) -> FaultyCall:
    """Return the call of a seed."""
    random = Random(seed)
    kind = random.choice(KINDS)
    dialect = random.choice(("chat", "chat", "completions", *(("generate",) if kind == "vllm" else ())))
    truth, body = _body(random, kind, dialect)
    over = random.random() < 0.02
    longest = max(len(choice.ids) for choice in truth.choices)
    sampling = body["sampling_params"] if dialect == "generate" else body
    sampling[MANY] = max(longest - 1, 1) if over else random.choice((longest, longest + 3, 64))
    count = random.choice((1, 1, 1, 1, *range(most_faults + 1)))
    faults = tuple((random.choice(tuple(FAULTS)), random.getrandbits(24)) for _ in range(count))
    return FaultyCall(
        seed=seed, kind=kind, dialect=dialect, body=body, truth=truth, faults=faults, over=over and longest > 1,
        streaming=random.choice(("auto", "auto", "live")),
        cut=random.getrandbits(20) if random.random() < 0.03 else None,
        reads=tuple(random.randrange(400) for _ in range(random.choice((0, 0, 1, 8)))),
        end=random.choice(ENDS),
    )  # fmt: skip


def drawn_truth(random: Random, body: Json, dialect: str) -> Truth:
    """Return what a healthy engine samples for any body."""
    sampling = body["sampling_params"] if dialect == "generate" else body
    samples = sampling.get("n") if sampling.get("n") in (1, 2, 3) else 1
    prompt = body.get("prompt") if dialect == "completions" else body.get("token_ids")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompts = prompt
    else:
        prompts = [prompt if isinstance(prompt, list) and prompt else _ids(random, 1, 5)]
    return Truth(
        prompts, [_choice(random, position, position // samples, dialect) for position in range(samples * len(prompts))]
    )


def serialized(written: Written, end: bytes = b"\n\n") -> bytes:
    """Return the bytes of a response. `end` is the terminator of its events."""
    if not written.is_stream:
        return _json(written.events[0].value)
    line = end[: len(end) // 2]
    events = [
        (b"event: " + event.name + line if event.name else b"") + b"data: " + _json(event.value) + end
        for event in written.events
    ]
    return b"".join(events) + (b"data: [DONE]" + end if written.done else b"") + written.tail


def least(call: FaultyCall, fails: Callable[[FaultyCall], bool]) -> FaultyCall:
    """Return the call with as few of its faults, cuts and reads as still fail."""
    smaller: Iterable[FaultyCall] = (
        replace(call, reads=(), end=b"\n\n"),
        replace(call, cut=None),
        *(
            replace(call, faults=call.faults[:position] + call.faults[position + 1 :])
            for position in range(len(call.faults))
        ),
    )
    for candidate in smaller:
        is_smaller = (candidate.reads, candidate.cut, candidate.faults, candidate.end) != (
            call.reads, call.cut, call.faults, call.end,
        )  # fmt: skip
        if is_smaller and fails(candidate):
            return least(candidate, fails)
    return call


def describe(call: FaultyCall, plan: Plan) -> str:
    """Return a description of the call for debugging."""
    text, content_type = call.response_to(plan.body)
    shown = text if len(text) < 4_000 else text[:3_000] + b" ... " + text[-1_000:]
    sampled = [(choice.index, choice.ids, choice.logprobs) for choice in call.truth.choices]
    return (
        f"faulty_calls.drawn({call.seed}) with faults {call.faults}: {call.kind} {call.path}, framing {plan.framing}\n"
        f"body: {call.body}\nprompts: {call.truth.prompts}\nsampled: {sampled}\nanswer ({content_type}):\n"
        + shown.decode("utf-8", "replace")
    )


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def _apply(fault: Fault, written: Written, request: EngineRequest, seed: int) -> bool:
    """Apply a fault. After another fault it may stop half-way, and has changed something then."""
    try:
        return fault.apply(written, request, Random(seed))
    except (TypeError, KeyError, AttributeError, IndexError, ValueError, StopIteration):
        return True


def _body(random: Random, kind: str, dialect: str) -> tuple[Truth, Json]:
    """Draw a truth and a request body for it."""
    samples = random.choice((1, 1, 1, 2, 3))
    several = dialect == "completions" and random.random() < 0.2
    prompts = [_ids(random, 1, 5) for _ in range(2 if several else 1)]
    choices = [_choice(random, position, position // samples, dialect) for position in range(samples * len(prompts))]
    versions = ["v1", "v2"] if random.random() < 0.3 else ["default"]
    body: Json = {"model": "tiny"}
    if dialect == "chat":
        body["messages"] = [{"role": "user", "content": "hi"}]
    elif dialect == "completions":
        body["prompt"] = prompts if several else prompts[0] if kind == "llamacpp" or random.random() < 0.5 else "hi"
    else:
        body |= {"token_ids": prompts[0], "sampling_params": {}}
    sampling = body["sampling_params"] if dialect == "generate" else body
    if samples > 1 or random.random() < 0.1:
        sampling["n"] = samples
    if random.random() < 0.5:
        body["stream"] = True
    body |= _wishes(random, dialect, streams="stream" in body)
    return Truth(prompts, choices, versions), body


def _wishes(random: Random, dialect: str, *, streams: bool) -> Json:
    """Draw the fields that an agent itself may request."""
    options: Json = {}
    if random.random() < 0.15:
        options["return_token_ids"] = True
    if random.random() < 0.2 and dialect != "generate":
        options["logprobs"] = True if dialect == "chat" else random.choice((0, 1))
        options["return_tokens_as_token_ids"] = True
    if streams and random.random() < 0.25:
        options["stream_options"] = {"include_usage": True} | random.choice(({}, {"continuous_usage_stats": True}))
    return options


def _choice(random: Random, index: int, prompt: int, dialect: str) -> Drawn:
    ids = _ids(random, 1, 6)
    logprobs = [_single(-random.random() * 9) for _ in ids]
    left, sizes = len(ids), []
    while left:
        sizes.append(random.choice([size for size in (1, 1, 1, 2, 3) if size <= left]))
        left -= sizes[-1]
    finishes: Sequence[str] = ("stop", "length", *(("tool_calls",) if dialect == "chat" and len(sizes) > 1 else ()))
    return Drawn(index, prompt, ids, logprobs, random.choice(finishes), sizes)


def _ids(random: Random, least: int, most: int) -> list[int]:
    """Draw ids of one model; no token occurs twice, so that no fault is without effect."""
    return random.sample(range(5, 4_000), random.randint(least, most))


def _single(value: float) -> float:
    """Draw a 32-bit float as engines format it."""
    return unpack("f", pack("f", value))[0]
