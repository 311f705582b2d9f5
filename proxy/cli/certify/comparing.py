"""What an engine returned, in a form that two runs of one request have in common."""

from math import isclose
from typing import Any, Final

import orjson

Path = tuple[Any, ...]
Merged = dict[Path, Any]

# Values that differ between any two runs of one request: names, times, addresses, and hits of the prefix cache.
_CHANGING: Final = frozenset(
    {"id", "request_id", "created", "timings", "prompt_tokens_details", "cached_tokens", "tokens_cached", "dp_rank", "id_slot",
     "cached_tokens_details", "tokens_evaluated", "__verbose"}
)  # fmt: skip
_TIMES: Final = ("_latency", "_throughput", "_time", "_ts")  # ends of names (SGLang 0.5.23)
_JOINED: Final = frozenset({"content", "reasoning", "reasoning_content", "arguments", "text"})  # strings in parts
_TEXT: Final = "text of all parts"
_NEAR: Final = 1e-3  # of logprobs
_DEPTH: Final = 40  # of nested values; what is deeper is not compared
_DONE: Final = b"[DONE]"


def payloads(content_type: str, body: bytes) -> list[Any]:
    """Return the JSON of a response, or of each event of a stream; `[DONE]` stays a string. Raises ValueError.

    An event with a name becomes an object of its name, `event`, and its JSON, `data`.
    """
    if content_type != "text/event-stream":
        return [orjson.loads(body)]
    found: list[Any] = []
    name = b""
    for line in body.split(b"\n"):
        field, _, value = line.rstrip(b"\r").partition(b":")
        if field == b"event":
            name = value.strip()
        elif field == b"data":
            data = value.strip()
            event = data.decode() if data == _DONE else orjson.loads(data)
            found.append({"event": name.decode("utf-8", "replace"), "data": event} if name else event)
            name = b""
    return found


def last_events(events: list[Any]) -> list[Any]:
    """Return the last event of each choice of SGLang's `/generate`, which repeats earlier events, and the keys of all.

    How many tokens an event adds depends on the load. A server with --incremental-streaming-output sends them only once.
    """
    last: dict[int, dict[str, Any]] = {}
    keys: set[str] = set()
    others: list[Any] = []
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("meta_info"), dict):
            others.append(event)
            continue
        keys |= {*event, *event["meta_info"]}
        index = event["index"] if type(event.get("index")) is int else 0
        ids, count = event.get("output_ids"), event["meta_info"].get("completion_tokens")
        is_partial = isinstance(ids, list) and isinstance(count, int) and len(ids) < count
        last[index] = {**event, **(_continued(last.get(index, {}), event) if is_partial else {})}
    return [{"choices": [{**event, "index": index} for index, event in last.items()], "keys": sorted(keys)}, *others]


def _continued(before: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """Append the ids and the text of an event to the ids and the text of the events before."""
    return {
        name: before[name] + event[name]
        for name in ("output_ids", "text")
        if type(before.get(name)) is type(event.get(name)) in (list, str)
    }


def merged(values: list[Any], *, is_stream: bool = False) -> Merged:
    """Return the contents of a response or of a stream's events, independent of how they are divided into events.

    Parts of strings and lists are joined by their place; of any other value but null, the distinct ones are kept. For each
    object of a response the keys are included in their order, so that none is added, lost or moved; for a stream, all keys at a
    place together, since an event of several tokens contains the keys of several events. Choices are distinguished by `index`.
    """
    found: Merged = {}
    for value in values:
        _gather(value, (), found, 0)
    if is_stream:
        for path, kept in found.items():
            if path[-1:] == ("keys",):
                found[path] = {(key,) for keys in kept for key in keys}
    has_calls = any("tool_calls" in path for path in found)
    return {
        path: _joined(path, kept, has_calls=has_calls) if path[-1:] == (_TEXT,) else kept
        for path, kept in found.items()
    }


def _joined(path: Path, parts: list[str], *, has_calls: bool) -> str:
    """Return a text; SGLang 0.5.23 sends the line breaks around a tool call only if they have an event of their own."""
    text = "".join(parts)
    return text.strip() if has_calls and path[-2] == "content" else text


def are_equal(expected: Any, actual: Any) -> bool:
    """Return whether two contents are equal, numbers nearly: batches of other sizes round differently."""
    if isinstance(expected, float) and isinstance(actual, float):
        return isclose(expected, actual, abs_tol=_NEAR)
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(are_equal(expected[key], actual[key]) for key in expected)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(are_equal, expected, actual))
    return type(expected) is type(actual) and bool(expected == actual)


def formats(merged_values: Merged) -> set[Any]:
    """Return the keys of every object, which two responses with different texts have in common."""
    return {(path, keys) for path, every in merged_values.items() if path[-1:] == ("keys",) for keys in every}


def difference(expected: Merged, actual: Merged) -> str:
    """Return the first place at which two responses differ, with both values."""
    for path in [*expected, *(path for path in actual if path not in expected)]:
        wanted, shown = expected.get(path), actual.get(path)
        if not are_equal(wanted, shown):
            place = ".".join(map(str, path[:-1]))[:80] or "the response"
            return (
                f"{place} {_two_keys(wanted, shown)}"
                if path[-1:] == ("keys",)
                else (f"{place} is {short(shown)}, the engine alone returns {short(wanted)}")
            )
    return ""


def _two_keys(wanted: Any, shown: Any) -> str:
    """Return how two sets of keys of objects differ."""
    alone, through = ({key for keys in every or () for key in keys} for every in (wanted, shown))
    if alone == through:
        return f"has its keys as {short(sorted(shown or ()))}, of the engine alone as {short(sorted(wanted or ()))}"
    return f"has more keys {short(sorted(through - alone))}, and lacks {short(sorted(alone - through))}"


def _gather(value: Any, path: Path, found: Merged, depth: int) -> None:
    if depth > _DEPTH:
        return
    if isinstance(value, dict):
        found.setdefault((*path, "keys"), set()).update({tuple(value)} - {()})
        for key, inner in value.items():
            if _changes(key):
                found.setdefault((*path, key, "present"), set()).add(inner is not None)
            else:
                _gather(inner, (*path, key), found, depth + 1)
    elif isinstance(value, list):
        numbered = [item for item in value if isinstance(item, dict) and type(item.get("index")) is int]
        if value and len(numbered) == len(value):
            for item in numbered:
                _gather(item, (*path, item["index"]), found, depth + 1)
        else:
            found.setdefault((*path, "list"), []).extend(_steady(item, depth) for item in value)
    elif isinstance(value, str) and path and path[-1] in _JOINED:
        found.setdefault((*path, _TEXT), []).append(value)
    elif value is not None:  # events have nulls in place of what others bring
        found.setdefault((*path, "values"), {})[repr(value)] = value


def _changes(key: str) -> bool:
    return key in _CHANGING or key.endswith(_TIMES)


def _steady(value: Any, depth: int) -> Any:
    """Return an item of a list without the values that change."""
    if depth > _DEPTH:
        return None
    if isinstance(value, list):
        return [_steady(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: inner is not None if _changes(key) else _steady(inner, depth + 1) for key, inner in value.items()}


def short(value: Any) -> str:
    """Return the start of a value's text."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sampled_ids(kind: str, response: Any) -> dict[int, list[int]] | None:
    """Return the ids of each choice in an unstreamed response to a request with `asking`; None if it has none.

    This does not use the code that records steps.
    """
    choices = response.get("choices") if isinstance(response, dict) else None
    found: dict[int, list[int]] = {}
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            return None
        ids = choice.get("token_ids", choice.get("response_token_ids"))
        if kind == "llamacpp":
            verbose = response.get("__verbose", choice.get("__verbose"))
            ids = verbose.get("tokens") if isinstance(verbose, dict) else None
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            return None
        found[choice["index"] if type(choice.get("index")) is int else len(found)] = ids
    return found or None


# Fields with which each engine returns the sampled ids itself, unstreamed.
ASKING: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"return_token_ids": True},
    "sglang": {"return_token_ids": True},
    "llamacpp": {"verbose": True, "return_tokens": True},
}
