"""Faults of engines: changes of a response before it is sent.

After a `flagged` fault no step may be exact, even if its ids happen to be right. After any other fault an exact step
has the true ids and logprobs.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson
from tests.support.faulty_engine import EngineRequest, Event, Written
from tests.support.odd_values import DEEPEST, nested, odd, odd_text, odd_type, paths_in, put

Json = dict[str, Any]
Apply = Callable[[Written, EngineRequest, Random], bool]
FIELDS = (
    "token_ids", "response_token_ids", "prompt_token_ids", "logprobs", "usage", "error", "choices", "sglext", "__verbose",
    "meta_info", "metadata", "weight_versions", "routed_experts", "sampling_mask", "matched_stop", "stop_reason", "tool_calls",
    "finish_reason", "index", "message", "delta", "text", "content", "reasoning", "reasoning_content", "model", "id", "object",
    "created", "system_fingerprint", "function", "arguments", "name", "role", "refusal", "annotations", "",
)  # fmt: skip


# --- places in a response --------------------------------------------------------------------------------------------


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def chunks(written: Written) -> list[Event]:
    """Return the events that have choices."""
    return [event for event in written.events if is_object(event.value) and event.value.get("choices")]


def choices(written: Written) -> list[Json]:
    return [choice for event in chunks(written) for choice in event.value["choices"]]


def events(written: Written) -> list[Event]:
    """Return the events of a stream."""
    return written.events if written.is_stream else []


def sampled(written: Written) -> list[Event]:
    """Return the events of a stream that contain ids or logprobs."""
    first = [(event, event.value["choices"][0]) for event in chunks(written) if written.is_stream]
    return [
        event for event, choice in first if choice.get("token_ids") or (choice.get("logprobs") or {}).get("content")
    ]


def finished(written: Written) -> list[Json]:
    """Return the choices with a finish reason."""
    return [choice for choice in choices(written) if choice.get("finish_reason")]


def finishing(written: Written) -> list[Event]:
    """Return the events of a stream with a finish reason."""
    return [event for event in chunks(written) if written.is_stream and event.value["choices"][0].get("finish_reason")]


def usages(written: Written) -> list[Json]:
    """Return the final usage, if there is one, as a list."""
    whole = [event.value for event in written.events if is_object(event.value)]
    last = [value for value in whole if not (written.is_stream and value.get("choices"))]
    return [value["usage"] for value in last if is_object(value.get("usage"))]


def running(written: Written) -> list[Json]:
    """Return the running counts of a stream, in order, without the first of each choice."""
    counts = [event.value.get("usage") for event in chunks(written) if written.is_stream]
    return [usage for usage in counts if is_object(usage) and usage.get("completion_tokens")]


def logprob_slots(written: Written) -> list[tuple[Any, Any]]:
    """Return container and key of each sampled token's logprob."""
    found: list[tuple[Any, Any]] = []
    for choice in choices(written):
        pairs = (choice.get("meta_info") or {}).get("output_token_logprobs")
        logprobs = choice.get("logprobs") or {}
        if pairs:
            found += [(pair, 0) for pair in pairs]
        elif "content" in logprobs:
            found += [(entry, "logprob") for entry in logprobs["content"]]
        else:
            values = logprobs.get("token_logprobs") or ()
            found += [(values, position) for position in range(len(values))]
    return found


def token_name_slots(written: Written) -> list[tuple[Any, Any]]:
    """Return container and key where an entry of logprobs names its token by the id."""
    found: list[tuple[Any, Any]] = []
    for choice in choices(written):
        pairs = (choice.get("meta_info") or {}).get("output_token_logprobs")
        logprobs = choice.get("logprobs") or {}
        if pairs:
            found += [(pair, 1) for pair in pairs]
        for entry in logprobs.get("content") or ():
            key = next((key for key in ("id", "token_id") if key in entry), "token")
            found += [(entry, key)] if not pairs and (key != "token" or _is_named(entry["token"])) else []
        tokens = logprobs.get("tokens") or ()
        found += [(tokens, position) for position, token in enumerate(tokens) if _is_named(token)]
    return found


def _is_named(token: Any) -> bool:
    return isinstance(token, str) and token.startswith("token_id:")


def at_path(value: Any, path: tuple) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


# --- faults ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault. `channel`: what it may change: `ids` (or logprobs, or prompts), what is `counted`, or neither."""

    name: str
    apply: Apply
    channel: str
    flagged: bool


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, at: Callable[[Written], list[Any]], *, channel: str = "other", flagged: bool = False
) -> Callable[[Callable[..., bool | None]], Callable[..., bool | None]]:
    """Register a function of the places `at` which it changes a response, a source of chance, the response and its request.

    It is called if there is such a place, and returns false if it changes nothing.
    """

    def register(change: Callable[..., bool | None]) -> Callable[..., bool | None]:
        def apply(written: Written, request: EngineRequest, random: Random) -> bool:
            found = at(written)
            return bool(found) and change(found, random, written, request) is not False

        FAULTS[name] = Fault(name, apply, channel, flagged)
        return change

    return register


@fault("duplicated chunk", sampled, channel="ids", flagged=True)
def duplicated(found, random, written, request):
    _insert_after(written, twice := random.choice(found), deepcopy(twice))


@fault("lost chunk", sampled, channel="ids", flagged=True)
def lost(found, random, written, request):
    _remove(written, random.choice(found))


@fault("lost event", events, channel="both")
def lost_event(found, random, written, request):
    return len(found) > 1 and _remove(written, random.choice(found))


fault("duplicated event", events, channel="ids")(duplicated)


@fault("swapped chunks", events, channel="ids")
def swapped(found, random, written, request):
    if len(found) < 2:
        return False
    first, second = random.sample(range(len(found)), 2)
    found[first], found[second] = found[second], found[first]
    return True


@fault("cumulative chunks", sampled, channel="ids")
def cumulative(found, random, written, request):
    """Repeat the ids and logprobs of earlier chunks in each chunk."""
    before: dict[tuple[int, str], list] = {}
    for event in found:
        choice = event.value["choices"][0]
        logprobs = choice.get("logprobs") or {}
        lists = [(choice, "token_ids"), *((logprobs, name) for name in logprobs)]
        for container, name in lists:
            if container.get(name):
                path = (choice["index"], name)
                container[name] = before[path] = before.get(path, []) + container[name]
    return len(found) > 1


@fault("running counts go back or repeat", running, channel="counted", flagged=True)
def running_back(found, random, written, request):
    random.choice(found)["completion_tokens"] -= random.choice((1, 1, 2))


@fault("id, model or prompt ids change", chunks, flagged=True)
def changed_head(found, random, written, request):
    if not written.is_stream or len(found) < 2:
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


@fault("prompt ids differ from those that were sent", lambda written: written.events, channel="ids")
def other_prompt(found, random, written, request):
    """Change prompt ids that the request itself contains."""
    prompt = request.body.get("token_ids") or request.body.get("prompt")
    objects = [event.value for event in found] + choices(written)
    changed = [part for part in objects if is_object(part) and part.get("prompt_token_ids")]
    if not isinstance(prompt, list) or not changed:
        return False
    for part in changed:
        part["prompt_token_ids"] = [*part["prompt_token_ids"][:-1], 4_077]
    return True


@fault(
    "a second event of ids", lambda written: [one for one in events(written) if one.value.get("sglext")], channel="ids"
)
def second_ids(found, random, written, request):
    """Send SGLang's event of ids twice, the second time with the ids of another call."""
    again = deepcopy(found[0])
    again.value["sglext"]["output_ids"][0][-1] = 4_077
    _insert_after(written, found[0], again)


@fault("a chunk under another choice's index", sampled, channel="ids")
def other_index(found, random, written, request):
    indexes = sorted({event.value["choices"][0]["index"] for event in found})
    if len(indexes) < 2:
        return False
    choice = random.choice(found).value["choices"][0]
    choice["index"] = random.choice([index for index in indexes if index != choice["index"]])
    return True


@fault("content after a finish reason", finishing, channel="ids", flagged=True)
def after_finish(found, random, written, request):
    last = random.choice(found)
    index = last.value["choices"][0]["index"]
    more = [event for event in sampled(written) if event.value["choices"][0]["index"] == index]
    if not more:
        return False
    again = deepcopy(more[0])
    again.value["choices"][0]["finish_reason"] = None
    return _insert_after(written, last, again)


@fault("two finish reasons", finishing, flagged=True)
def two_finishes(found, random, written, request):
    again = deepcopy(last := random.choice(found))
    choice = again.value["choices"][0]
    content = {"delta": {}} if "delta" in choice else {"text": ""} if "text" in choice else {}
    again.value["choices"] = [{"index": choice["index"], **content, "finish_reason": random.choice(("stop", "length"))}]
    again.value.pop("usage", None)
    _insert_after(written, last, again)


@fault("content after the end", sampled, flagged=True)
def after_done(found, random, written, request):
    written.tail = b"data: " + orjson.dumps(found[-1].value) + b"\n\n"


@fault("final usage is off by some", usages, channel="counted", flagged=True)
def usage_off(found, random, written, request):
    found[-1][random.choice(("completion_tokens", "prompt_tokens"))] += random.choice((-1, 1, 1, 1_000))


@fault("final usage has numbers of another type", usages, channel="counted", flagged=True)
def usage_typed(found, random, written, request):
    name = random.choice(("completion_tokens", "prompt_tokens"))
    value = found[-1][name]
    found[-1][name] = random.choice((str(value), value + 0.5, True, False, [value], {"count": value}))


@fault("final usage without counts", usages, channel="usage", flagged=True)
def usage_empty(found, random, written, request):
    for name in random.choice((("completion_tokens",), ("prompt_tokens",), tuple(found[-1]))):
        found[-1].pop(name, None)


@fault("two final usages that differ", events, channel="counted", flagged=True)
def usage_twice(found, random, written, request):
    last = [event for event in found if is_object(event.value) and event.value.get("choices") == []]
    if not last or not is_object(last[-1].value.get("usage")):
        return False
    _insert_after(written, last[-1], twice := deepcopy(last[-1]))
    random.choice((twice, last[-1])).value["usage"]["completion_tokens"] += random.choice((-1, 1, 1_000))
    return True


@fault("no usage", usages, channel="usage", flagged=True)
def usage_missing(found, random, written, request):
    if written.is_stream:
        _remove(written, next(event for event in reversed(written.events) if event.value.get("usage")))
        return
    written.events[0].value["usage"] = None
    if random.random() < 0.5:
        del written.events[0].value["usage"]


@fault("usage is missing though it was requested", usages, channel="usage")
def usage_ignored(found, random, written, request):
    """Ignore `stream_options`, as an old server does: vLLM's fingerprint is then in the event with the finish reason."""
    if not written.is_stream:
        return False
    usage = next(event for event in reversed(written.events) if event.value.get("usage"))
    if not usage.value.get("choices"):
        _remove(written, usage)
    for event in chunks(written):
        event.value.pop("usage", None)
    if "system_fingerprint" in usage.value:
        written.events[-1].value["system_fingerprint"] = usage.value["system_fingerprint"]
    return True


@fault("an invalid logprob", logprob_slots, flagged=True)
def bad_logprob(found, random, written, request):
    container, key = random.choice(found)
    fixed = (False, True, None, 0.5, 1, "x", "-0.5", *map(orjson.Fragment, (b"NaN", b"1e400", b"-1e400")))
    container[key] = random.choice((*fixed, odd_type(random, int, float, type(None))))


@fault("a logprob of another token", token_name_slots, flagged=True)
def misnamed(found, random, written, request):
    container, key = random.choice(found)
    container[key] = "token_id:4077" if isinstance(container[key], str) else 4_077


@fault("unknown finish reason", finished, flagged=True)
def unknown_finish(found, random, written, request):
    reason = random.choice(("banana", "", "STOP", "stop ", orjson.Fragment(b'"\\ud800"'), "x" * 5_000))
    random.choice(found)["finish_reason"] = reason


@fault("finish reason of any type", finished, flagged=True)
def odd_finish(found, random, written, request):
    random.choice(found)["finish_reason"] = odd_type(random, str, *((dict,) if request.kind == "sglang" else ()))


@fault("index of any kind", choices, channel="ids", flagged=True)
def odd_index(found, random, written, request):
    choice = random.choice(found)
    index = choice["index"]
    fixed = (-1, bool(index), float(index), 2**31, 2**63 - 1, 2**40, None, str(index))
    choice["index"] = random.choice((*fixed, odd_type(random, int)))


@fault("no index", choices, channel="ids", flagged=True)
def no_index(found, random, written, request):
    return random.choice(found).pop("index", None) is not None


@fault("an error and choices in one event", chunks, flagged=True)
def error_beside(found, random, written, request):
    error = {"message": "out of memory", "type": "InternalServerError", "code": 500}
    random.choice(found).value["error"] = random.choice((error, "out of memory", 500, [error]))


@fault("no message", choices, flagged=True)
def no_message(found, random, written, request):
    if written.is_stream or request.dialect == "generate":
        return False
    name = "message" if request.dialect == "chat" else "text"
    choice = random.choice(found)
    choice[name] = odd_type(random, dict) if name == "message" else odd_type(random, str, int)
    if random.random() < 0.5:
        del choice[name]
    return True


@fault("tool calls of any type", choices, flagged=True)
def odd_tool_calls(found, random, written, request):
    messages = [message for choice in found if is_object(message := choice.get("message") or choice.get("delta"))]
    if not messages:
        return False
    kinds = (odd_type(random, list, type(None)), [5], ["f"], [{"function": 5}], [[]])
    random.choice(messages)["tool_calls"] = random.choice(kinds)
    return True


@fault("weight versions of any type", choices, flagged=True)
def odd_versions(found, random, written, request):
    metas = [choice.get("meta_info") or choice for choice in found]
    spans = [span for meta in metas for span in meta.get("weight_versions") or ()]
    if not spans:
        return False
    span = random.choice(spans)
    name = random.choice(("version", "start", "end"))
    span[name] = odd_type(random, str, int, type(None)) if name == "version" else odd_type(random, int)
    return True


@fault("an odd value anywhere", lambda written: written.events, channel="both")
def odd_anywhere(found, random, written, request):
    event = random.choice(found)
    paths = paths_in(event.value)
    if not paths:
        return False
    path = random.choice(paths)
    old = at_path(event.value, path)
    kinds = (float, int) if type(old) is float else (type(old),)  # another number may be valid
    put(event.value, path, odd_type(random, *kinds) if random.random() < 0.8 else orjson.Fragment(nested(random)))
    return True


@fault("an odd field anywhere", lambda written: written.events, channel="both")
def odd_field(found, random, written, request):
    event = random.choice(found)
    objects = [event.value, *(at_path(event.value, path) for path in paths_in(event.value))]
    random.choice([value for value in objects if is_object(value)])[random.choice(FIELDS)] = odd(random)


@fault("a field is missing anywhere", lambda written: written.events, channel="both")
def missing_field(found, random, written, request):
    event = random.choice(found)
    paths = [path for path in paths_in(event.value) if isinstance(path[-1], str)]
    if not paths:
        return False
    path = random.choice(paths)
    del at_path(event.value, path[:-1])[path[-1]]
    return True


@fault("an odd event", lambda written: written.events)
def odd_event(found, random, written, request):
    is_nested = random.random() < 0.3
    text = nested(random, random.choice((254, 1_023, DEEPEST))) if is_nested else odd_text(random)
    event = Event(orjson.Fragment(text))
    if written.is_stream:
        found.insert(random.randint(0, len(found)), event)
    else:
        found[0] = event


@fault("no terminal event", events, flagged=True)
def no_done(found, random, written, request):
    written.done = False


def _insert_after(written: Written, event: Event, more: Event) -> bool:
    written.events.insert(_place(written, event) + 1, more)
    return True


def _remove(written: Written, event: Event) -> bool:
    del written.events[_place(written, event)]
    return True


def _place(written: Written, event: Event) -> int:
    return next(position for position, other in enumerate(written.events) if other is event)
