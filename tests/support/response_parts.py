"""Locations in a response that an engine is about to send: chunks, choices, counts, logprobs and token names."""

from typing import Any

from tests.support.faulty_engine import Event, Written

Json = dict[str, Any]


def chunks(written: Written) -> list[Event]:
    """Return the events that have choices."""
    return [event for event in written.events if is_object(event.value) and event.value.get("choices")]


def choices(written: Written) -> list[Json]:
    return [choice for event in chunks(written) for choice in event.value["choices"]]


def sampled(written: Written) -> list[Event]:
    """Return the events of a stream that contain ids or logprobs."""
    return [event for event in chunks(written) if written.is_stream and _carries(event.value["choices"][0])]


def usages(written: Written) -> list[Json]:
    """Return the final usage, if there is one, as a list."""
    last = [event.value for event in written.events if is_object(event.value) and not _is_running(written, event)]
    return [value["usage"] for value in last if is_object(value.get("usage"))]


def running(written: Written) -> list[Json]:
    """Return the running counts of a stream, in order, without the first of each choice."""
    found = [
        event.value["usage"] for event in chunks(written) if written.is_stream and is_object(event.value.get("usage"))
    ]
    return [usage for usage in found if usage.get("completion_tokens")]


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
            found += [
                (logprobs["token_logprobs"], position) for position in range(len(logprobs.get("token_logprobs") or ()))
            ]
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


def is_object(value: Any) -> bool:
    """Return whether this is a JSON object."""
    return isinstance(value, dict)


def at_path(value: Any, path: tuple) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


def _is_named(token: Any) -> bool:
    return isinstance(token, str) and token.startswith("token_id:")


def _carries(choice: Json) -> bool:
    return bool(choice.get("token_ids") or (choice.get("logprobs") or {}).get("content"))


def _is_running(written: Written, event: Event) -> bool:
    return written.is_stream and bool(event.value.get("choices"))
