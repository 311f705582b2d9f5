"""Faults of engines. Each function changes a response before it is sent, and returns whether it found something to
change.

After a `flagged` fault no step may be exact, even if its ids happen to be right. After any other fault an exact step
has the true ids and logprobs.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random

import orjson
from tests.support.faulty_engine import EngineRequest, Event, Written
from tests.support.odd_values import DEEPEST, nested, odd, odd_text, odd_type, paths_in, put
from tests.support.response_parts import (
    at_path,
    choices,
    chunks,
    is_object,
    logprob_slots,
    running,
    sampled,
    token_name_slots,
    usages,
)

Apply = Callable[[Written, EngineRequest, Random], bool]
FIELDS = (
    "token_ids", "response_token_ids", "prompt_token_ids", "logprobs", "usage", "error", "choices", "sglext", "__verbose",
    "meta_info", "metadata", "weight_versions", "routed_experts", "sampling_mask", "matched_stop", "stop_reason", "tool_calls",
    "finish_reason", "index", "message", "delta", "text", "content", "reasoning", "reasoning_content", "model", "id", "object",
    "created", "system_fingerprint", "function", "arguments", "name", "role", "refusal", "annotations", "",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault. `channel`: what it may change: `ids` (or logprobs, or prompts), what is `counted`, or neither."""

    name: str
    apply: Apply
    channel: str
    flagged: bool


FAULTS: dict[str, Fault] = {}


def fault(name: str, *, channel: str = "other", flagged: bool = False) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        FAULTS[name] = Fault(name, apply, channel, flagged)
        return apply

    return register


@fault("duplicated chunk", channel="ids", flagged=True)
def duplicated(written: Written, request: EngineRequest, random: Random) -> bool:
    found = sampled(written)
    return bool(found) and _insert_after(written, twice := random.choice(found), deepcopy(twice))


@fault("lost chunk", channel="ids", flagged=True)
def lost(written: Written, request: EngineRequest, random: Random) -> bool:
    found = sampled(written)
    return bool(found) and _remove(written, random.choice(found))


@fault("lost event", channel="both")
def lost_event(written: Written, request: EngineRequest, random: Random) -> bool:
    return written.is_stream and len(written.events) > 1 and _remove(written, random.choice(written.events))


@fault("duplicated event", channel="ids")
def duplicated_event(written: Written, request: EngineRequest, random: Random) -> bool:
    return written.is_stream and _insert_after(written, twice := random.choice(written.events), deepcopy(twice))


@fault("swapped chunks", channel="ids")
def swapped(written: Written, request: EngineRequest, random: Random) -> bool:
    if not written.is_stream or len(written.events) < 2:
        return False
    first, second = random.sample(range(len(written.events)), 2)
    events = written.events
    events[first], events[second] = events[second], events[first]
    return True


@fault("cumulative chunks", channel="ids")
def cumulative(written: Written, request: EngineRequest, random: Random) -> bool:
    """Repeat the ids and logprobs of earlier chunks in each chunk."""
    before: dict[tuple[int, str], list] = {}
    found = sampled(written)
    for event in found:
        choice = event.value["choices"][0]
        logprobs = choice.get("logprobs") or {}
        lists = [(choice, "token_ids"), *((logprobs, name) for name in logprobs)]
        for container, name in lists:
            if container.get(name):
                path = (choice["index"], name)
                container[name] = before[path] = before.get(path, []) + container[name]
    return len(found) > 1


@fault("running counts go back or repeat", channel="counted", flagged=True)
def running_back(written: Written, request: EngineRequest, random: Random) -> bool:
    found = running(written)
    if not found:
        return False
    random.choice(found)["completion_tokens"] -= random.choice((1, 1, 2))
    return True


@fault("id, model or prompt ids change", flagged=True)
def changed_head(written: Written, request: EngineRequest, random: Random) -> bool:
    if not written.is_stream or len(found := chunks(written)) < 2:
        return False
    name = random.choice(("id", "request_id", "model"))
    if request.dialect == "chat" and request.kind == "vllm" and random.random() < 0.5:
        prompts = [event.value for event in found if event.value.get("prompt_token_ids")]
        if not prompts:
            return False
        found[-1].value["prompt_token_ids"] = [*prompts[0]["prompt_token_ids"][:-1], 4_077]
        return prompts[0] is not found[-1].value
    for event in found[random.randrange(1, len(found)) :]:
        if name not in event.value:
            return False
        event.value[name] = f"other-{event.value[name]}"
    return True


@fault("prompt ids differ from those that were sent", channel="ids")
def other_prompt(written: Written, request: EngineRequest, random: Random) -> bool:
    """Change prompt ids that the request itself contains."""
    prompt = request.body.get("token_ids") or request.body.get("prompt")
    if not isinstance(prompt, list):
        return False
    objects = [event.value for event in written.events] + choices(written)
    found = [part for part in objects if is_object(part) and part.get("prompt_token_ids")]
    for part in found:
        part["prompt_token_ids"] = [*part["prompt_token_ids"][:-1], 4_077]
    return bool(found)


@fault("a second event of ids", channel="ids")
def second_ids(written: Written, request: EngineRequest, random: Random) -> bool:
    """Send SGLang's event of ids twice, the second time with the ids of another call."""
    found = [event for event in written.events if written.is_stream and event.value.get("sglext")]
    if not found:
        return False
    again = deepcopy(found[0])
    again.value["sglext"]["output_ids"][0][-1] = 4_077
    return _insert_after(written, found[0], again)


@fault("a chunk under another choice's index", channel="ids")
def other_index(written: Written, request: EngineRequest, random: Random) -> bool:
    found = sampled(written)
    indexes = sorted({event.value["choices"][0]["index"] for event in found})
    if len(indexes) < 2:
        return False
    choice = random.choice(found).value["choices"][0]
    choice["index"] = random.choice([index for index in indexes if index != choice["index"]])
    return True


@fault("content after a finish reason", channel="ids", flagged=True)
def after_finish(written: Written, request: EngineRequest, random: Random) -> bool:
    finishing = [
        event for event in chunks(written) if written.is_stream and event.value["choices"][0].get("finish_reason")
    ]
    carrying = sampled(written)
    if not finishing or not carrying:
        return False
    last = random.choice(finishing)
    index = last.value["choices"][0]["index"]
    more = [event for event in carrying if event.value["choices"][0]["index"] == index]
    if not more:
        return False
    again = deepcopy(more[0])
    again.value["choices"][0]["finish_reason"] = None
    return _insert_after(written, last, again)


@fault("two finish reasons", flagged=True)
def two_finishes(written: Written, request: EngineRequest, random: Random) -> bool:
    finishing = [
        event for event in chunks(written) if written.is_stream and event.value["choices"][0].get("finish_reason")
    ]
    if not finishing:
        return False
    again = deepcopy(last := random.choice(finishing))
    choice = again.value["choices"][0]
    content = {"delta": {}} if "delta" in choice else {"text": ""} if "text" in choice else {}
    again.value["choices"] = [{"index": choice["index"], **content, "finish_reason": random.choice(("stop", "length"))}]
    again.value.pop("usage", None)
    return _insert_after(written, last, again)


@fault("content after the end", flagged=True)
def after_done(written: Written, request: EngineRequest, random: Random) -> bool:
    carrying = sampled(written)
    if not carrying:
        return False
    written.tail = b"data: " + orjson.dumps(carrying[-1].value) + b"\n\n"
    return True


@fault("final usage is off by some", channel="counted", flagged=True)
def usage_off(written: Written, request: EngineRequest, random: Random) -> bool:
    found = usages(written)
    if not found:
        return False
    found[-1][random.choice(("completion_tokens", "prompt_tokens"))] += random.choice((-1, 1, 1, 1_000))
    return True


@fault("final usage has numbers of another type", channel="counted", flagged=True)
def usage_typed(written: Written, request: EngineRequest, random: Random) -> bool:
    found = usages(written)
    if not found:
        return False
    name = random.choice(("completion_tokens", "prompt_tokens"))
    value = found[-1][name]
    found[-1][name] = random.choice((str(value), value + 0.5, True, False, [value], {"count": value}))
    return True


@fault("final usage without counts", channel="usage", flagged=True)
def usage_empty(written: Written, request: EngineRequest, random: Random) -> bool:
    found = usages(written)
    if not found:
        return False
    for name in random.choice((("completion_tokens",), ("prompt_tokens",), tuple(found[-1]))):
        found[-1].pop(name, None)
    return True


@fault("two final usages that differ", channel="counted", flagged=True)
def usage_twice(written: Written, request: EngineRequest, random: Random) -> bool:
    found = [event for event in written.events if is_object(event.value) and event.value.get("choices") == []]
    if not written.is_stream or not found or not is_object(found[-1].value.get("usage")):
        return False
    _insert_after(written, found[-1], twice := deepcopy(found[-1]))
    random.choice((twice, found[-1])).value["usage"]["completion_tokens"] += random.choice((-1, 1, 1_000))
    return True


@fault("no usage", channel="usage", flagged=True)
def usage_missing(written: Written, request: EngineRequest, random: Random) -> bool:
    if not usages(written):
        return False
    if written.is_stream:
        return _remove(written, next(event for event in reversed(written.events) if event.value.get("usage")))
    written.events[0].value["usage"] = None
    if random.random() < 0.5:
        del written.events[0].value["usage"]
    return True


@fault("usage is missing though it was requested", channel="usage")
def usage_ignored(written: Written, request: EngineRequest, random: Random) -> bool:
    """Ignore `stream_options`, as an old server does: vLLM's fingerprint is then in the event with the finish reason."""
    if not written.is_stream or not usages(written):
        return False
    usage = next(event for event in reversed(written.events) if event.value.get("usage"))
    if not usage.value.get("choices"):
        _remove(written, usage)
    for event in chunks(written):
        event.value.pop("usage", None)
    if "system_fingerprint" in usage.value:
        written.events[-1].value["system_fingerprint"] = usage.value["system_fingerprint"]
    return True


@fault("an invalid logprob", flagged=True)
def bad_logprob(written: Written, request: EngineRequest, random: Random) -> bool:
    found = logprob_slots(written)
    if not found:
        return False
    container, key = random.choice(found)
    fixed = (
        False,
        True,
        None,
        0.5,
        1,
        "x",
        "-0.5",
        orjson.Fragment(b"NaN"),
        orjson.Fragment(b"1e400"),
        orjson.Fragment(b"-1e400"),
    )
    container[key] = random.choice((*fixed, odd_type(random, int, float, type(None))))
    return True


@fault("a logprob of another token", flagged=True)
def misnamed(written: Written, request: EngineRequest, random: Random) -> bool:
    found = token_name_slots(written)
    if not found:
        return False
    container, key = random.choice(found)
    container[key] = "token_id:4077" if isinstance(container[key], str) else 4_077
    return True


@fault("unknown finish reason", flagged=True)
def unknown_finish(written: Written, request: EngineRequest, random: Random) -> bool:
    found = [choice for choice in choices(written) if choice.get("finish_reason")]
    if not found:
        return False
    reason = random.choice(("banana", "", "STOP", "stop ", orjson.Fragment(b'"\\ud800"'), "x" * 5_000))
    random.choice(found)["finish_reason"] = reason
    return True


@fault("finish reason of any type", flagged=True)
def odd_finish(written: Written, request: EngineRequest, random: Random) -> bool:
    found = [choice for choice in choices(written) if choice.get("finish_reason")]
    if not found:
        return False
    random.choice(found)["finish_reason"] = odd_type(random, str, *((dict,) if request.kind == "sglang" else ()))
    return True


@fault("index of any kind", channel="ids", flagged=True)
def odd_index(written: Written, request: EngineRequest, random: Random) -> bool:
    found = choices(written)
    if not found:
        return False
    choice = random.choice(found)
    index = choice["index"]
    fixed = (-1, bool(index), float(index), 2**31, 2**63 - 1, 2**40, None, str(index))
    choice["index"] = random.choice((*fixed, odd_type(random, int)))
    return True


@fault("no index", channel="ids", flagged=True)
def no_index(written: Written, request: EngineRequest, random: Random) -> bool:
    found = choices(written)
    return bool(found) and random.choice(found).pop("index", None) is not None


@fault("an error and choices in one event", flagged=True)
def error_beside(written: Written, request: EngineRequest, random: Random) -> bool:
    found = chunks(written)
    if not found:
        return False
    error = {"message": "out of memory", "type": "InternalServerError", "code": 500}
    random.choice(found).value["error"] = random.choice((error, "out of memory", 500, [error]))
    return True


@fault("no message", flagged=True)
def no_message(written: Written, request: EngineRequest, random: Random) -> bool:
    if written.is_stream or request.dialect == "generate":
        return False
    name = "message" if request.dialect == "chat" else "text"
    found = random.choice(choices(written))
    found[name] = odd_type(random, dict) if name == "message" else odd_type(random, str, int)
    if random.random() < 0.5:
        del found[name]
    return True


@fault("tool calls of any type", flagged=True)
def odd_tool_calls(written: Written, request: EngineRequest, random: Random) -> bool:
    messages = [choice.get("message") or choice.get("delta") for choice in choices(written)]
    found = [message for message in messages if is_object(message)]
    if not found:
        return False
    kinds = (odd_type(random, list, type(None)), [5], ["f"], [{"function": 5}], [[]])
    random.choice(found)["tool_calls"] = random.choice(kinds)
    return True


@fault("weight versions of any type", flagged=True)
def odd_versions(written: Written, request: EngineRequest, random: Random) -> bool:
    metas = [choice.get("meta_info") or choice for choice in choices(written)]
    found = [span for meta in metas for span in meta.get("weight_versions") or ()]
    if not found:
        return False
    span = random.choice(found)
    name = random.choice(("version", "start", "end"))
    span[name] = odd_type(random, str, int, type(None)) if name == "version" else odd_type(random, int)
    return True


@fault("an odd value anywhere", channel="both")
def odd_anywhere(written: Written, request: EngineRequest, random: Random) -> bool:
    event = random.choice(written.events)
    found = paths_in(event.value)
    if not found:
        return False
    path = random.choice(found)
    old = at_path(event.value, path)
    kinds = (float, int) if type(old) is float else (type(old),)  # another number may be valid
    put(event.value, path, odd_type(random, *kinds) if random.random() < 0.8 else orjson.Fragment(nested(random)))
    return True


@fault("an odd field anywhere", channel="both")
def odd_field(written: Written, request: EngineRequest, random: Random) -> bool:
    event = random.choice(written.events)
    objects = [event.value, *(at_path(event.value, path) for path in paths_in(event.value))]
    random.choice([value for value in objects if is_object(value)])[random.choice(FIELDS)] = odd(random)
    return True


@fault("a field is missing anywhere", channel="both")
def missing_field(written: Written, request: EngineRequest, random: Random) -> bool:
    event = random.choice(written.events)
    found = [path for path in paths_in(event.value) if isinstance(path[-1], str)]
    if not found:
        return False
    path = random.choice(found)
    del at_path(event.value, path[:-1])[path[-1]]
    return True


@fault("an odd event")
def odd_event(written: Written, request: EngineRequest, random: Random) -> bool:
    value = orjson.Fragment(
        nested(random, random.choice((254, 1_023, DEEPEST))) if random.random() < 0.3 else odd_text(random)
    )
    if not written.is_stream:
        written.events[0] = Event(value)
    else:
        written.events.insert(random.randint(0, len(written.events)), Event(value))
    return True


@fault("no terminal event", flagged=True)
def no_done(written: Written, request: EngineRequest, random: Random) -> bool:
    written.done = not written.is_stream
    return written.is_stream


def _insert_after(written: Written, event: Event, more: Event) -> bool:
    written.events.insert(_place(written, event) + 1, more)
    return True


def _remove(written: Written, event: Event) -> bool:
    del written.events[_place(written, event)]
    return True


def _place(written: Written, event: Event) -> int:
    return next(position for position, other in enumerate(written.events) if other is event)
