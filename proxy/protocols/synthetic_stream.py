"""An unstreamed response, rendered as the stream that the engine would have sent.

It is used for calls that are sent unstreamed because the engine's streams lose tokens.

Rule 1: accumulating the events returns the response: nothing is lost or repeated.
Rule 2: a choice's events are its role, its reasoning, its text, its tool calls, its finish; ids and logprobs that the client
        requested are on the first event with text, as when an engine sends several tokens at once.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from proxy.protocols.engines.base import Json, StreamShape
from proxy.protocols.lenient_json import NotJson, read_json, write_json

DONE: Final = b"data: [DONE]\n\n"

_THOUGHTS: Final = ("reasoning_content", "reasoning")
# Fields of an unstreamed choice that streams lack (vLLM 0.32.0).
_UNSTREAMED: Final = frozenset({"index", "message", "logprobs", "finish_reason", "prompt_logprobs", "routed_experts"})


def replay_events(shape: StreamShape, dialect: str, response: Json, *, usage: bool, loosely: bool = False) -> bytes:
    """Return the whole stream of a response, with its terminal event. `usage`: the client requested it."""
    events = [_event(chunk, loosely=loosely) for chunk in chunks(shape, dialect, response, usage=usage)]
    return b"".join([*events, DONE])


def error_events(body: bytes) -> bytes:
    """Return an engine's error as an event of a stream that has begun (vLLM 0.32.0, SGLang 0.5.23)."""
    try:
        error, _ = read_json(body)
    except NotJson:
        error = {"message": body.decode("utf-8", "replace")}
    nested = error if isinstance(error, dict) and "error" in error else {"error": error}
    return b"data: " + write_json(nested, loosely=False) + b"\n\n" + DONE


def chunks(shape: StreamShape, dialect: str, response: Json, *, usage: bool) -> Iterator[Json]:
    """Yield the events as JSON. Raises TypeError, KeyError or AttributeError for an invalid response."""
    kind = "chat.completion.chunk" if dialect == "chat" else response.get("object")
    head = {key: kind if key == "object" else value for key, value in response.items() if key in shape.head}
    last = {key: response[key] for key in shape.last if key in response}
    choice_events = _chat_choice if dialect == "chat" else _text_choice
    events_so_far = [
        {**head, "choices": [choice], **first}
        for whole in sorted(response["choices"], key=lambda choice: choice["index"])
        for choice, first in choice_events(shape, whole, response)
    ]
    events_so_far += [
        {**head, "choices": [], **_no_usage_yet(shape), key: response[key]}
        for key in shape.alone
        if response.get(key) is not None
    ]
    if usage:
        events_so_far.append({**head, "choices": [], "usage": _usage(shape, response.get("usage"))})
    if events_so_far:
        events_so_far[-1] |= last
    yield from events_so_far


def _usage(shape: StreamShape, usage: Any) -> Any:
    """Return usage in the format of streams."""
    if shape.null_usage or not isinstance(usage, dict):
        return usage
    return {key: value for key, value in usage.items() if value is not None}


def _chat_choice(shape: StreamShape, whole: Json, response: Json) -> Iterator[tuple[Json, Json]]:
    """Yield the events of one chat choice, each with its additional top-level fields."""
    first = {key: response[key] for key in shape.first if key in response}
    yield _choice(shape, whole, dict(shape.role), early=False), first
    logprobs = whole.get("logprobs")
    early = {key: whole[key] for key in shape.early if key in whole}
    for delta in _deltas(shape, whole["message"]):
        choice = _choice(shape, whole, delta, early=True)
        if logprobs is not None:
            choice["logprobs"] = logprobs
        yield {**choice, **early}, _no_usage_yet(shape) if "tool_calls" in delta else {}
        logprobs, early = None, dict.fromkeys(early)
    finish = _choice(shape, whole, dict(shape.delta), early=False)
    if logprobs is not None:  # tokens without text
        finish["logprobs"] = logprobs
    ending = {key: whole.get(key) for key in shape.choice}
    extra = {key: value for key, value in whole.items() if key not in _UNSTREAMED | ending.keys() | early.keys()}
    yield {**finish, "finish_reason": whole.get("finish_reason"), **ending, **early, **extra}, {}


def _choice(shape: StreamShape, whole: Json, delta: Json, *, early: bool) -> Json:
    """Return a choice of an event with this delta."""
    silent: Json = {"logprobs": None} if shape.null_logprobs else {}
    # vLLM has stop_reason in its last event only; SGLang has matched_stop in each.
    waiting = {} if shape.early else dict.fromkeys(shape.choice)
    ids = dict.fromkeys(key for key in shape.early if early and key in whole)
    return {"index": whole["index"], "delta": delta, **silent, "finish_reason": None, **waiting, **ids}


def _deltas(shape: StreamShape, message: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the deltas of a message, one field at a time."""
    for key in _THOUGHTS:
        if message.get(key):
            yield {**shape.delta, key: message[key]}
    content = {
        key: value
        for key, value in message.items()
        if key not in {"role", "tool_calls", *_THOUGHTS} and value not in (None, "")
    }
    if content:
        yield {**shape.delta, **content}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = function.get("arguments")
        named = {key: value for key, value in function.items() if key != "arguments"}
        opening = {**call, "index": call.get("index", index), "function": {**named, **shape.call}}
        yield {**shape.call_delta, "tool_calls": [opening]}
        if arguments:
            more = {**shape.more_function, "arguments": arguments}
            yield {**shape.call_delta, "tool_calls": [{**shape.more_call, "index": opening["index"], "function": more}]}


def _text_choice(shape: StreamShape, whole: Json, _response: Json) -> Iterator[tuple[Json, Json]]:
    """Yield a choice of completions as one event, as engines do for several tokens at once."""
    choice = {key: value for key, value in whole.items() if key not in {"prompt_logprobs", "routed_experts"}}
    yield choice, _no_usage_yet(shape)


def _no_usage_yet(shape: StreamShape) -> Json:
    return {"usage": None} if shape.no_usage_yet else {}


def _event(chunk: Json, *, loosely: bool) -> bytes:
    return b"data: " + write_json(chunk, loosely=loosely) + b"\n\n"
