"""The response object and its items as JSON, complete or in progress."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from proxy.protocols.dialects.responses.item_ids import response_name
from proxy.protocols.dialects.responses.validation import objects, optional, required, unknown
from proxy.protocols.dialects.translation import CallIdentity, Json

Status = Literal["in_progress", "completed", "incomplete", "failed"]

# By the chat choice's finish reason; with any other reason the response is completed.
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter", "repetition": None}
_BROKEN: Final = {"abort": "The engine aborted the response.", "error": "The engine failed during the response."}


def ending(finish_reason: object) -> tuple[Status, Json]:
    """Return the status of a response, and the fields with the reason if it is not completed."""
    if finish_reason in _INCOMPLETE:
        return "incomplete", {"incomplete_details": {"reason": _INCOMPLETE[str(finish_reason)]}}
    if finish_reason in _BROKEN:
        return "failed", failure(_BROKEN[str(finish_reason)])
    return "completed", {}


def failure(message: str) -> Json:
    """Return the error field of a failed response."""
    return {"error": {"code": "server_error", "message": message}}


def make_response(
    body: Mapping[str, Any],
    identity: CallIdentity,
    *,
    status: Status = "in_progress",
    output: Sequence[Json] = (),
    usage: object = None,
    reason: Mapping[str, Any] | None = None,
) -> Json:
    """Return a response object. Fields of the client that TokenTape does not use are repeated unchanged."""
    text = body.get("text")
    return {
        "id": response_name(identity.step_id, identity.rollout_id),
        "object": "response",
        "created_at": identity.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": identity.model,
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
        "usage": usage_from(usage),
        "user": body.get("user"),
        **(reason or {}),
    }


def _tool(tool: Json) -> Json:
    """Return a tool as it was sent, with the fields that are optional in requests and required in responses."""
    return {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool


def usage_from(usage: object) -> Json | None:
    """Return the usage in this dialect, from chat's."""
    if not isinstance(usage, dict):
        return None
    prompt, sampled = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    details, completion_details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": _count(details, "cached_tokens"), "cache_write_tokens": 0},
        "output_tokens": sampled,
        # SGLang 0.5 has reasoning_tokens on the top level.
        "output_tokens_details": {
            "reasoning_tokens": _count(completion_details, "reasoning_tokens") or _count(usage, "reasoning_tokens")
        },
        "total_tokens": prompt + sampled,
    }


def _count(usage: object, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else 0


def logprob_entries(logprobs: object) -> list[Json]:
    """Return chat's logprobs in the format of Responses: without ids, and always with bytes."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top_logprobs") or ()]}
        for entry in entries or ()
        if "logprob" in entry  # llama.cpp returns probabilities instead with `post_sampling_probs`
    ]


def _logprob(entry: Json) -> Json:
    token = entry["token"]
    own = entry.get("bytes")
    return {"token": token, "bytes": list(token.encode()) if own is None else own, "logprob": entry["logprob"]}


ENCRYPTED: Final = "reasoning.encrypted_content"  # the value of `include` that requests it
_SEAL: Final = "tokentape-1."


def seal(reasoning: str) -> str:
    """Return reasoning as opaque text for the client."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Return the reasoning in a sealed text; None if TokenTape did not seal it."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def reasoning_from(item: Json, path: str) -> str | None:
    """Return an item's reasoning: its text, else its sealed text, else its summary; None if it has none of these."""
    texts = _texts(item, "content", {"reasoning_text", "text"}, path)
    summary = _texts(item, "summary", {"summary_text"}, path)
    sealed = optional(item, "encrypted_content", str, path)
    if texts:
        return "".join(texts)
    opened = None if sealed is None else unseal(sealed)
    return opened if opened is not None else "\n\n".join(summary) or None


def _texts(item: Json, name: str, kinds: set[str], path: str) -> list[str]:
    """Return the texts of a list of parts."""
    texts = []
    for number, part in enumerate(objects(optional(item, name, list, path) or [], f"{path}.{name}")):
        part_path = f"{path}.{name}[{number}]"
        kind = required(part, "type", str, part_path)
        if kind not in kinds:
            raise unknown(f"{part_path}.type", kind, f"use {' or '.join(sorted(kinds))}")
        texts.append(required(part, "text", str, part_path))
    return texts
