"""Parts, candidates, finish reasons and token counts of a response in Google's format."""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.dialects.gemini.signatures import sign
from proxy.protocols.dialects.tool_arguments import call_ids, parse_arguments
from proxy.protocols.dialects.translation import Json

_REASONING_FIELDS: Final = (
    "reasoning",
    "reasoning_content",
)  # vLLM 0.32 has the first, SGLang 0.5.23 and llama.cpp the second
# By chat's finish reason. `abort`: the engine interrupted the call, for example because its weights change. `repetition` (vLLM)
# is a limit like any other.
_REASONS: Final = {
    "stop": "STOP", "tool_calls": "STOP", "function_call": "STOP", "length": "MAX_TOKENS", "repetition": "MAX_TOKENS",
    "content_filter": "SAFETY",
}  # fmt: skip


class CandidateParts:
    """The parts of one candidate: `take` those of a delta or a message, then `end`.

    The first part that is no thought is signed with the thoughts before it; thoughts after it are in the signature of the end.
    """

    __slots__ = ("_has_content", "_is_signed", "_shows", "_step_id", "_thoughts")

    def __init__(self, step_id: str, *, shows_thoughts: bool) -> None:
        self._step_id = step_id
        self._shows = shows_thoughts
        self._thoughts: list[str] = []
        self._is_signed = True
        self._has_content = False

    def take(self, delta: Mapping[str, Any]) -> list[Json]:
        """Return the parts of the reasoning and the text of a delta."""
        parts: list[Json] = []
        if reasoning := next((delta[name] for name in _REASONING_FIELDS if delta.get(name)), None):
            self._thoughts.append(reasoning)
            self._is_signed = False
            if self._shows:
                parts.append({"text": reasoning, "thought": True})
        if content := delta.get("content"):
            parts.append({"text": content, **({} if self._has_content else self._signature())})
            self._has_content = True
        return parts

    def end(self, message: Mapping[str, Any], *, must_have_one: bool) -> list[Json]:
        """Return the parts of the calls of a message, or an empty text if the candidate has to have one more part."""
        calls = message.get("tool_calls") or []
        parts: list[Json] = []
        for call_id, call in zip(call_ids(calls, self._step_id, "call"), calls, strict=True):
            function = call.get("function") or {}
            arguments = parse_arguments(function.get("arguments") or "")
            called = {"id": call_id, "name": function.get("name") or "", "args": arguments}
            parts.append({"functionCall": called, **self._signature(call_id)})
        if not parts and (must_have_one or not self._has_content or not self._is_signed):
            parts = [{"text": "", **self._signature()}]
        return parts

    def _signature(self, call_id: str | None = None) -> Json:
        """Return the field of a signature, if it has any content."""
        thoughts = None if self._is_signed else "".join(self._thoughts)
        self._is_signed = True
        if call_id is None and thoughts is None:
            return {}
        return {"thoughtSignature": sign(call_id=call_id, thoughts=thoughts)}


def content_of(parts: list[Json]) -> Json:
    """Return a content of the model."""
    return {"parts": parts, "role": "model"}


def ending_of(choice: Mapping[str, Any]) -> Json:
    """Return the fields of a candidate that are known at its end: its finish reason, and requested logprobs."""
    finish = choice.get("finish_reason")
    fields: Json = {"finishReason": _REASONS.get(str(finish), "OTHER")}
    if fields["finishReason"] == "OTHER":
        fields["finishMessage"] = f"The engine ended the response early ({finish or 'no reason'})."
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return fields | _logprobs(entries) if entries else fields


def _logprobs(entries: list[Json]) -> Json:
    """Return the logprobs of the sampled tokens and of their alternatives, as texts without ids.

    llama.cpp writes a logprob of minus infinity as null, with which there is no average.
    """
    result: Json = {"chosenCandidates": [_token(entry) for entry in entries]}
    if any(entry.get("top_logprobs") for entry in entries):
        tops = ([_token(other) for other in entry.get("top_logprobs") or ()] for entry in entries)
        result["topCandidates"] = [{"candidates": others} for others in tops]
    known = [value for entry in entries if isinstance(value := entry.get("logprob"), int | float)]
    average = {"avgLogprobs": sum(known) / len(known)} if len(known) == len(entries) else {}
    return {**average, "logprobsResult": result}


def _token(entry: Mapping[str, Any]) -> Json:
    return {"token": entry.get("token"), "logProbability": entry.get("logprob")}


def usage_from(usage: Any) -> Json:
    """Return the token counts: those of the candidates are without those of thoughts, if the engine counts these."""
    counts = usage if isinstance(usage, Mapping) else {}
    prompt, completion = _count(counts, "prompt_tokens") or 0, _count(counts, "completion_tokens") or 0
    thoughts = _count(counts.get("completion_tokens_details"), "reasoning_tokens")
    thoughts = _count(counts, "reasoning_tokens") if thoughts is None else thoughts  # SGLang 0.5.23
    cached = _count(counts.get("prompt_tokens_details"), "cached_tokens")
    optional = {"cachedContentTokenCount": cached, "thoughtsTokenCount": thoughts}
    return {
        "promptTokenCount": prompt,
        "candidatesTokenCount": max(0, completion - (thoughts or 0)),
        "totalTokenCount": prompt + completion,
        **{name: count for name, count in optional.items() if count},
    }


def _count(counts: Any, name: str) -> int | None:
    value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if type(value) is int else None
