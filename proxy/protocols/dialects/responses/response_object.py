"""The response object and its items as JSON, complete or in progress."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from proxy.protocols.dialects.responses.item_ids import response_name
from proxy.protocols.dialects.responses.validation import objects, optional, required, unknown
from proxy.protocols.dialects.translation import CallIdentity, Json

Status = Literal["in_progress", "completed", "incomplete", "failed"]

# How an answer ended, by the chat choice's finish reason; every other reason is a completed answer.
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter", "repetition": None}
_BROKEN: Final = {"abort": "The engine aborted the response.", "error": "The engine failed during the response."}


def ending(finish_reason: object) -> tuple[Status, Json]:
    """The status of an answer, and the fields that say why it is not completed."""
    if finish_reason in _INCOMPLETE:
        return "incomplete", {"incomplete_details": {"reason": _INCOMPLETE[str(finish_reason)]}}
    if finish_reason in _BROKEN:
        return "failed", failure(_BROKEN[str(finish_reason)])
    return "completed", {}


def failure(message: str) -> Json:
    """What says that an answer failed."""
    return {"error": {"code": "server_error", "message": message}}


def answer(
    body: Mapping[str, Any],
    told: CallIdentity,
    *,
    status: Status = "in_progress",
    output: Sequence[Json] = (),
    usage: object = None,
    why: Mapping[str, Any] | None = None,
) -> Json:
    """A response object. What a client sent and we do not use stands in it as it was sent."""
    text = body.get("text")
    return {
        "id": response_name(told.step_id, told.rollout_id),
        "object": "response",
        "created_at": told.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": told.model,
        "output": list(output),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {name: (body.get("reasoning") or {}).get(name) for name in ("effort", "summary")},
        "safety_identifier": body.get("safety_identifier"),
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": text if text and text.get("format") else {**(text or {}), "format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
        "usage": usage_of(usage),
        "user": body.get("user"),
        **(why or {}),
    }


def _tool(tool: Json) -> Json:
    """A tool as it was sent; functions have fields that may be left out of a call and not of an answer."""
    return {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool


def usage_of(usage: object) -> Json | None:
    """Tokens by chat's usage."""
    if not isinstance(usage, dict):
        return None
    said, sampled = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    details, thought = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": said,
        "input_tokens_details": {"cached_tokens": _count(details, "cached_tokens"), "cache_write_tokens": 0},
        "output_tokens": sampled,
        # SGLang 0.5 has them on the top level.
        "output_tokens_details": {
            "reasoning_tokens": _count(thought, "reasoning_tokens") or _count(usage, "reasoning_tokens")
        },
        "total_tokens": said + sampled,
    }


def _count(usage: object, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else 0


def logprob_entries(logprobs: object) -> list[Json]:
    """Chat's logprobs of tokens, as Responses has them: no ids, and bytes always."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top_logprobs") or ()]}
        for entry in entries or ()
        if "logprob" in entry  # llama.cpp's `post_sampling_probs` has other numbers in its place
    ]


def _logprob(entry: Json) -> Json:
    token = entry["token"]
    told = entry.get("bytes")
    return {"token": token, "bytes": list(token.encode()) if told is None else told, "logprob": entry["logprob"]}


ENCRYPTED: Final = "reasoning.encrypted_content"  # what `include` says of wanting it
_SEAL: Final = "tokentape-1."


def seal(thoughts: str) -> str:
    """Thoughts as a client's opaque text."""
    return _SEAL + base64.b64encode(thoughts.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The thoughts again; None if they were sealed by somebody else."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def thoughts_of(item: Json, at: str) -> str | None:
    """The thoughts that an item carries: its text, else what we sealed, else its summary. None: nobody here can read it."""
    said = _texts(item, "content", {"reasoning_text", "text"}, at)
    summary = _texts(item, "summary", {"summary_text"}, at)
    sealed = optional(item, "encrypted_content", str, at)
    if said:
        return "".join(said)
    opened = None if sealed is None else unseal(sealed)
    return opened if opened is not None else "\n\n".join(summary) or None


def _texts(item: Json, name: str, kinds: set[str], at: str) -> list[str]:
    """The texts of a list of parts."""
    texts = []
    for number, part in enumerate(objects(optional(item, name, list, at) or [], f"{at}.{name}")):
        where = f"{at}.{name}[{number}]"
        kind = required(part, "type", str, where)
        if kind not in kinds:
            raise unknown(f"{where}.type", kind, f"use {' or '.join(sorted(kinds))}")
        texts.append(required(part, "text", str, where))
    return texts
