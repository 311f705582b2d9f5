"""The blocks of a response, and the events of a stream, in Anthropic's format."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.protocols.dialects.translation import CallIdentity, Json

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


def message(told: CallIdentity, content: list[Json], usage: Json, reason: str | None, stop: str | None) -> Json:
    """Return a response, at its beginning or complete."""
    return {
        "id": f"msg_{told.step_id}",
        "type": "message",
        "role": "assistant",
        "model": told.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "stop_details": None,
        "usage": usage,
    }


def text(said: str) -> Json:
    """Return a text block."""
    return {"type": "text", "text": said}


def thinking(thought: str, signature: str) -> Json:
    """Return a reasoning block."""
    return {"type": "thinking", "thinking": thought, "signature": signature}


def tool_use(choose_call_id: str, name: str, given: Json) -> Json:
    """Return a tool call."""
    return {"type": "tool_use", "id": choose_call_id, "name": name, "input": given}


def signature_of(told: CallIdentity) -> str:
    """Return a signature for reasoning: clients do not send back reasoning without one."""
    return f"sig_{told.step_id}"


def event(kind: str, **fields: object) -> bytes:
    """Return one event of a stream."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


# Of chat's finish reasons. `abort`: the engine put the call off (its weights change), and the agent may go on with what
# there is; that is what Anthropic's `pause_turn` says. `repetition` (vLLM) is a limit like any other.
_REASONS = {
    "length": "max_tokens",
    "repetition": "max_tokens",
    "content_filter": "refusal",
    "abort": "pause_turn",
    None: "pause_turn",
}


def stop_of(choice: Mapping[str, Any], stops: Any) -> tuple[str, str | None]:
    """Why a choice ended (`stop_reason`), and by which stop sequence, if it was one of the client's (`stops`).

    vLLM has the string in `stop_reason`, SGLang in `matched_stop`; llama.cpp's server does not say, so it ends its turn.
    """
    finish = choice.get("finish_reason")
    if finish in _REASONS:
        return _REASONS[finish], None
    if (choice.get("message") or {}).get("tool_calls"):
        return "tool_use", None
    for said in (choice.get("stop_reason"), choice.get("matched_stop")):
        if isinstance(said, str) and isinstance(stops, list) and said in stops:
            return "stop_sequence", said
    return "end_turn", None


def usage_of(usage: Any) -> Json:
    """Usage as this dialect counts: tokens that came out of the engine's cache are not among those that came in."""
    given = usage if isinstance(usage, Mapping) else {}
    cached = _count(given.get("prompt_tokens_details"), "cached_tokens") or 0
    counts: Json = {
        "input_tokens": max(0, (_count(given, "prompt_tokens") or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": _count(given, "completion_tokens") or 0,
    }
    thought = _count(given.get("completion_tokens_details"), "reasoning_tokens")
    thought = _count(given, "reasoning_tokens") if thought is None else thought  # SGLang 0.5.23
    if thought is not None:
        counts["output_tokens_details"] = {"thinking_tokens": thought}
    return counts


def _count(counts: Any, name: str) -> int | None:
    value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if type(value) is int else None
