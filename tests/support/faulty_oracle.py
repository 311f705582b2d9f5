"""The assertions about an exchange with a faulty engine, in this process: `complaint(call)` returns a violation or
None.

`EXCUSED` lists what no check can detect: the engine's response is then as consistent as a correct one.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from time import thread_time
from typing import Any

import orjson
from tests.support.engine_faults import FAULTS
from tests.support.faulty_calls import FaultyCall

from proxy.export import FORMATS, Inexpressible
from proxy.protocols.exchange import Exchange
from proxy.protocols.plan import Plan
from proxy.protocols.response import EventParser
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import Record, decode, encode_leniently
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.outline import outline
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import PROBLEMS, Step, Timing

Json = dict[str, Any]
LONGEST_S = 0.1
TOO_LONG = " s of CPU at once"
FACTS = RolloutFacts("r1", "g1", status="completed", reward=1.0, advantages=0.5)


@dataclass(frozen=True)
class Excuse:
    """A fault that no check can detect."""

    name: str
    reason: str
    applies: Callable[[FaultyCall, Json], bool]


def _counts_running(call: FaultyCall, body: Json) -> bool:
    options = body.get("stream_options")
    sends_counts = isinstance(options, dict) and options.get("include_usage") and options.get("continuous_usage_stats")
    return call.kind == "vllm" and bool(sends_counts)


def _channels(call: FaultyCall) -> list[str]:
    return [FAULTS[name].channel for name in call.used]


def _swapped(call: FaultyCall, body: Json) -> bool:
    return "swapped chunks" in call.used and not _counts_running(call, body)


def _several_of_ids(call: FaultyCall, body: Json) -> bool:
    several = sum(channel in ("ids", "both") for channel in _channels(call)) > 1
    return several and ("cumulative chunks" in call.used or not _counts_running(call, body))


def _ids_and_counts(call: FaultyCall, body: Json) -> bool:
    channels = _channels(call)
    both = bool({"ids", "both"} & {*channels}) and bool({"counted", "both"} & {*channels})
    return len(channels) > 1 and both and not _counts_running(call, body)


def _uncounted(call: FaultyCall, body: Json) -> bool:
    counted_by_finish = call.kind == "vllm" and call.dialect != "generate"
    ignored = "usage is missing though it was requested" in call.used
    return body.get("stream") is True and (ignored or (not counted_by_finish and "no usage" in call.used))


def _only_name(call: FaultyCall, body: Json) -> bool:
    return call.kind == "llamacpp" and body.get("stream") is True and "a logprob of another token" in call.used


EXCUSED = (
    Excuse(
        "chunks out of order, without running counts",
        "Each chunk is right, and so are their number and their sum: nothing in them shows their order.",
        _swapped,
    ),
    Excuse(
        "several faults in the ids of one response",
        "A lost chunk and a repeated one of the same length leave every count as it was; where each event has a running "
        "count, a lost chunk and cumulative ones may still add up.",
        _several_of_ids,
    ),
    Excuse(
        "a fault in the ids and one in the counts",
        "The count may err by just as many tokens as the ids.",
        _ids_and_counts,
    ),
    Excuse(
        "a stream without counts, from an engine that may not support them",
        "Servers that do not know `stream_options` correctly answer without usage, so a lost token cannot be detected.",
        _uncounted,
    ),
    Excuse(
        "another id in the logprobs of a llama.cpp stream",
        "Its streams have ids only in the entries of logprobs, so there is nothing to compare them with.",
        _only_name,
    ),
)


def excuse(call: FaultyCall, body: Json) -> Excuse | None:
    """Return why the call's faults cannot be detected; None if they must be."""
    return next((candidate for candidate in EXCUSED if candidate.applies(call, body)), None)


def must_be_flagged(call: FaultyCall, body: Json) -> bool:
    """Return whether the step has to be flagged even with the right ids. One fault may undo another."""
    if call.cut is not None:
        return False
    if call.over and not call.faults:
        # A parsed tool call of SGLang may have more tokens than max_tokens (observed with its own serving code).
        return call.kind != "sglang" or all(choice.finish != "tool_calls" for choice in call.truth.choices)
    name = call.used[0] if len(call.faults) == 1 and call.used else None
    if excuse(call, body):
        return False
    if name == "content after the end" and (call.reads or call.end != b"\n\n"):
        return False  # nothing is read after a complete response
    return name is not None and FAULTS[name].flagged


def recorded(call: FaultyCall, plan: Plan) -> Step:
    """Return the step of a call that receives its response in one read."""
    text, content_type = call.response_to(plan.body)
    exchange = Exchange(plan, 200, content_type)
    exchange.response.feed(text)
    if exchange.missing()[1] is not None:
        exchange.follow_up_response = {"tokens": call.truth.prompts[0]}
    return exchange.finish(Timing(received=1.0)).step


def complaint(call: FaultyCall) -> str | None:
    """Return what is wrong with the exchange of this call; None if nothing is.

    A slow operation must be slow twice: the garbage collector may run in any of them.
    """
    found = _complaint(call)
    return _complaint(call) if found is not None and found.endswith(TOO_LONG) else found


def _complaint(call: FaultyCall) -> str | None:
    try:
        plan = call.plan()
        text, content_type = call.response_to(plan.body)
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        return f"the test itself failed: {error!r}"
    exchange = Exchange(plan, 200, content_type)
    try:
        longest, shown = 0.0, []
        for read in call.in_reads(text):
            before = thread_time()
            shown.append(exchange.response.feed(read))
            longest = max(longest, thread_time() - before)
        before = thread_time()
        if exchange.missing()[1] is not None:
            exchange.follow_up_response = {"tokens": call.truth.prompts[0]}
        outcome = exchange.finish(Timing(received=1.0))
        longest = max(longest, thread_time() - before)
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        return f"the exchange raised {error!r}"
    if longest > LONGEST_S:
        return f"{longest:.3f}{TOO_LONG}"
    step, record = encode_leniently(outcome.step)
    return (
        _shown_early(b"".join(shown), plan)
        or _not_json(b"".join(shown) + outcome.end, text)
        or _mistyped(step)
        or _unreadable(step, record, call.seed)
        or _wrong(step, call, plan)
    )


def right(step: Step, call: FaultyCall) -> bool:
    """Return whether a step has the true prompts, ids and logprobs."""
    found = [(choice.index, choice.prompt, choice.ids.tolist(), choice.logprobs.tolist()) for choice in step.choices]
    truth = [(choice.index, choice.prompt, choice.ids, choice.logprobs) for choice in call.truth.choices]
    return [ids.tolist() for ids in step.prompts] == call.truth.prompts and sorted(found) == truth


def _ids(step: Step) -> str:
    return f"{step.prompts} {[(choice.index, choice.ids, choice.logprobs) for choice in step.choices]}"


def _wrong(step: Step, call: FaultyCall, plan: Plan) -> str | None:
    if not step.exact or excuse(call, plan.body):
        return None
    if not right(step, call):
        return f"an exact step differs from what was sampled, after {call.used}: {_ids(step)}"
    return (
        f"nothing is flagged after {call.used or 'more tokens than max_tokens'}"
        if must_be_flagged(call, plan.body)
        else None
    )


def _shown_early(shown: bytes, plan: Plan) -> str | None:
    """Check that the end of the turn is sent after the step is stored, never before."""
    cutter, finished = EventParser(), set()
    for event in cutter.feed(shown):
        if event.payload == b"[DONE]":
            return "the terminal event was sent before the step was stored"
        with suppress(orjson.JSONDecodeError, AttributeError, TypeError, KeyError, IndexError):
            for choice in orjson.loads(event.payload)["choices"]:
                if isinstance(choice["finish_reason"], str) and type(choice["index"]) is int:
                    finished.add(choice["index"])
    if len(finished) >= (plan.response_options.choices or 1):
        return f"the last finish reason was sent before the step was stored: {shown[-1_000:]!r}"
    return None


def _not_json(shown: bytes, sent: bytes) -> str | None:
    """Check that values that JSON does not have are not added to a response."""
    for word in (b"Infinity", b"NaN"):
        if word in shown and word not in sent:
            return f"the client gets {word.decode()}, which the engine did not send"
    return None


def _mistyped(step: Step) -> str | None:
    """Check that values of a wrong type are not in the step."""
    for choice in step.choices:
        typed = {
            "index": type(choice.index) is int and choice.index >= 0,
            "finish_reason": isinstance(choice.finish_reason, str | None),
            "stop_reason": type(choice.stop_reason) in (str, int, type(None)),
            "spans": all(isinstance(span.policy_version, str | None) for span in choice.spans),
        }
        if not all(typed.values()):
            odd = ", ".join(name for name, holds in typed.items() if not holds)
            return f"an odd type in a choice's {odd}; the step is {'exact' if step.exact else step.problems}"
    unknown = [code for code in step.problems if code not in PROBLEMS]
    return f"unknown problems {unknown}" if unknown else None


def _unreadable(step: Step, written: Record, seed: int) -> str | None:
    """Check that readers accept the stored step."""
    try:
        read = decode(written.record, BlockReader(written.blocks))
        orjson.dumps(outline([read], FACTS))
        name = Random(seed).choice(tuple(FORMATS))
        with suppress(Inexpressible):
            form = FORMATS[name]
            orjson.dumps(form.rows(FACTS, [read], Options()).rows, option=orjson.OPT_SERIALIZE_NUMPY)
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        return f"a reader raised {error!r} for a step that is {'exact' if step.exact else step.problems}"
    return None
