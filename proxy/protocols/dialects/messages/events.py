"""The blocks of a response, and the events of a stream, in Anthropic's format."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.protocols.dialects.translation import CallIdentity, Json

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


def message(identity: CallIdentity, content: list[Json], usage: Json, reason: str | None, stop: str | None) -> Json:
    """Return a response, at its beginning or complete."""
    return {
        "id": f"msg_{identity.step_id}",
        "type": "message",
        "role": "assistant",
        "model": identity.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "stop_details": None,
        "usage": usage,
    }


def text(content: str) -> Json:
    """Return a text block."""
    return {"type": "text", "text": content}


def thinking(reasoning: str, signature: str) -> Json:
    """Return a reasoning block."""
    return {"type": "thinking", "thinking": reasoning, "signature": signature}


def tool_use(call_id: str, name: str, arguments: Json) -> Json:
    """Return a tool call."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def signature_for(identity: CallIdentity) -> str:
    """Return a signature for reasoning: clients do not send back reasoning without one."""
    return f"sig_{identity.step_id}"


def event(kind: str, **fields: object) -> bytes:
    """Return one event of a stream."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


# By chat's finish reason. `abort`: the engine interrupted the call (its weights change), and the agent may continue from the
# partial response, as with Anthropic's `pause_turn`. `repetition` (vLLM) is a limit like any other.
_REASONS = {
    "length": "max_tokens",
    "repetition": "max_tokens",
    "content_filter": "refusal",
    "abort": "pause_turn",
    None: "pause_turn",
}


def stop_reason_from(choice: Mapping[str, Any], stops: Any) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a choice; the latter is None unless it is one of the client's (`stops`).

    vLLM has the string in `stop_reason`, SGLang in `matched_stop`; llama.cpp's server has none, so it is `end_turn`.
    """
    finish = choice.get("finish_reason")
    if finish in _REASONS:
        return _REASONS[finish], None
    if (choice.get("message") or {}).get("tool_calls"):
        return "tool_use", None
    for matched in (choice.get("stop_reason"), choice.get("matched_stop")):
        if isinstance(matched, str) and isinstance(stops, list) and matched in stops:
            return "stop_sequence", matched
    return "end_turn", None


def usage_from(usage: Any) -> Json:
    """Return the usage in this dialect: `input_tokens` excludes tokens from the engine's prefix cache."""
    chat_usage = usage if isinstance(usage, Mapping) else {}
    cached = _count(chat_usage.get("prompt_tokens_details"), "cached_tokens") or 0
    counts: Json = {
        "input_tokens": max(0, (_count(chat_usage, "prompt_tokens") or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": _count(chat_usage, "completion_tokens") or 0,
    }
    reasoning_tokens = _count(chat_usage.get("completion_tokens_details"), "reasoning_tokens")
    reasoning_tokens = (
        _count(chat_usage, "reasoning_tokens") if reasoning_tokens is None else reasoning_tokens
    )  # SGLang 0.5.23
    if reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": reasoning_tokens}
    return counts


def _count(counts: Any, name: str) -> int | None:
    value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if type(value) is int else None
