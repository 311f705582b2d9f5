"""Google's Gemini API, translated to chat: its responses (whole, as events or as a JSON array), errors and paths.

Each chunk of a stream is a response with the new parts. Function calls are whole parts, and belong to the last chunk: an agent
runs a function only for a stored step.

Invariant: the parts of all chunks, with adjacent texts joined, are the parts of the whole response.

A path has a model and a method, or is of the models. A model's name may contain slashes and colons, encoded or not:
`models/org/name:7b:generateContent`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import orjson

from proxy.errors import BadRequest, LimitReached, ProxyError
from proxy.protocols.dialects.base import (
    CallIdentity,
    DialectName,
    Json,
    References,
    ResponseRenderer,
    StreamFormat,
    Translator,
    engine_message,
    text_or_none,
)
from proxy.protocols.dialects.gemini.contents import call_ids_from, sign
from proxy.protocols.dialects.gemini.request import read, shows_thoughts
from proxy.protocols.dialects.translation import (
    an_object,
    at,
    call_ids,
    choices_of,
    optional,
    parse_arguments,
    read_usage,
    reasoning_of,
    refusal,
)

# By chat's finish reason. `abort`: the engine interrupted the call, for example because its weights change. `repetition` (vLLM)
# is a limit like any other.
_REASONS: Final = {
    "stop": "STOP", "tool_calls": "STOP", "function_call": "STOP", "length": "MAX_TOKENS", "repetition": "MAX_TOKENS",
    "content_filter": "SAFETY",
}  # fmt: skip


class CandidateParts:
    """Makes the parts of one candidate: `take` each delta, or the message, then `end`.

    The first part that is not a thought is signed with the thoughts before it; later thoughts are in a signature
    from `end`.
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
        if reasoning := reasoning_of(delta):
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
        thoughts = None if self._is_signed else "".join(self._thoughts)
        self._is_signed = True
        if call_id is None and thoughts is None:
            return {}
        return {"thoughtSignature": sign(call_id=call_id, thoughts=thoughts)}


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

    llama.cpp writes a logprob of minus infinity as null; then there is no average.
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
    """Return the token counts. The candidates' count excludes thoughts if the engine counts thoughts."""
    counts = read_usage(usage)
    optional = {"cachedContentTokenCount": counts.cached, "thoughtsTokenCount": counts.reasoning}
    return {
        "promptTokenCount": counts.prompt,
        "candidatesTokenCount": max(0, counts.completion - (counts.reasoning or 0)),
        "totalTokenCount": counts.prompt + counts.completion,
        **{name: count for name, count in optional.items() if count},
    }


# By status, as google.rpc.Code.
_STATUS_NAMES: Final = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED",
    409: "ABORTED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 501: "UNIMPLEMENTED", 502: "UNAVAILABLE",
    503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
_TYPE: Final = "type.googleapis.com/google.rpc."


def name_for(status: int) -> str:
    """Return the name of a status."""
    return _STATUS_NAMES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")


def error_object(status: int, message: str, *, name: str | None = None, details: Sequence[Json] = ()) -> Json:
    """Return an error, as in bodies and streams."""
    error: Json = {"code": status, "message": message, "status": name or name_for(status)}
    return {"error": {**error, "details": list(details)} if details else error}


def error_for(error: ProxyError) -> Json:
    """Return an error of TokenTape.

    Its details have its code, the field of an invalid value, and the delay after which a retry may succeed.
    """
    details: list[Json] = [{"@type": f"{_TYPE}ErrorInfo", "reason": error.code.upper(), "domain": "tokentape"}]
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if error.retry_after_s is not None and not isinstance(error, LimitReached):
        details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{error.retry_after_s}s"})
    return error_object(error.status, error.message, details=details)


def error_from(text: str) -> Json:
    """Return the error of an engine's error event, or of a body of `error_for`, for a stream that has begun."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # an error body of a stream as an array
        text = orjson.dumps(value).decode()
    inner = value.get("error") if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return error_object(500, engine_message(text))
    code = inner.get("code")
    status = code if type(code) is int and 400 <= code < 600 else 500
    details = details if isinstance(details := inner.get("details"), list) else ()
    return error_object(status, engine_message(text), name=text_or_none(inner.get("status")), details=details)


# Clients of Google's read a comment as JSON (google-genai 3.4); an empty line is nothing to them.
_EVENTS: Final = StreamFormat("text/event-stream; charset=utf-8", b"\r\n\r\n")
_ARRAY: Final = StreamFormat("application/json; charset=UTF-8", b"\n")
_NO_RESPONSE: Final = "The engine's response ended before it began."


class GeminiRenderer(ResponseRenderer):
    """Renders the response to one call."""

    def __init__(self, identity: CallIdentity, *, is_array: bool, shows_thoughts: bool) -> None:
        self._identity = identity
        self._shows_thoughts = shows_thoughts
        self._is_array = is_array
        self._is_begun = False
        self._candidates: dict[int, CandidateParts] = {}
        self.stream_format = _ARRAY if self._is_array else _EVENTS

    def whole(self, response: Json) -> Json:
        candidates = []
        for choice in choices_of(response):
            message, parts = choice.get("message") or {}, self._parts(choice)
            found = [*parts.take(message), *parts.end(message, must_have_one=False)]
            candidates.append(_candidate(choice, found) | ending_of(choice))
        return self._response(candidates, response.get("usage"))

    def feed(self, chunk: Json) -> bytes:
        candidates = [
            _candidate(choice, parts)
            for choice in chunk.get("choices") or ()
            if (parts := self._parts(choice).take(choice.get("delta") or {}))
        ]
        return self._written(self._response(candidates, None)) if candidates else b""

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        if error is not None:
            last = error_from(error)
        elif response is None:
            last = error_object(500, _NO_RESPONSE)
        else:
            candidates = []
            for choice in choices_of(response):
                parts = self._parts(choice).end(choice.get("message") or {}, must_have_one=True)
                candidates.append(_candidate(choice, parts) | ending_of(choice))
            last = self._response(candidates, response.get("usage"))
        return self._written(last) + (b"]\n" if self._is_array else b"")

    def _parts(self, choice: Mapping[str, Any]) -> CandidateParts:
        index = choice.get("index", 0)
        if index not in self._candidates:
            self._candidates[index] = CandidateParts(self._identity.step_id, shows_thoughts=self._shows_thoughts)
        return self._candidates[index]

    def _response(self, candidates: list[Json], usage: Any) -> Json:
        counted = {} if usage is None else {"usageMetadata": usage_from(usage)}
        names = {"modelVersion": self._identity.model, "responseId": self._identity.step_id}
        return {"candidates": candidates, **counted, **names}

    def _written(self, response: Json) -> bytes:
        begins, self._is_begun = not self._is_begun, True
        text = orjson.dumps(response)
        if self._is_array:
            return (b"[" if begins else b",\r\n") + text
        return b"data: " + text + b"\r\n\r\n"


def _candidate(choice: Mapping[str, Any], parts: list[Json]) -> Json:
    return {"content": {"parts": parts, "role": "model"}, "index": choice.get("index", 0)}


_PREFIXES: Final = ("/v1beta/", "/v1alpha/")  # the versions of Google's API
_V1: Final = "/v1/models"  # version 1 of Google's API; OpenAI's list of models has the same path
_CLIENT: Final = ("x-goog-api-client", "x-goog-api-key")  # headers of its clients
GENERATE: Final = ":generateContent"
STREAM: Final = ":streamGenerateContent"  # as server-sent events, with `alt=sse`
STREAM_ARRAY: Final = ":streamGenerateContent?alt=json"  # as a JSON array
COUNT: Final = ":countTokens"
METHODS: Final = (GENERATE, STREAM, COUNT)
_WHOLE: Final = "generateContentRequest"  # of a request that counts tokens


@dataclass(frozen=True, slots=True)
class Target:
    """A path of the Gemini API. `model` is empty for the list of models, `method` empty for a model itself."""

    model: str
    method: str


def is_gemini(endpoint: str, headers: Mapping[str, str]) -> bool:
    """Return whether a path, still encoded, is one of the Gemini API."""
    if endpoint.startswith(_PREFIXES):
        return True
    if not endpoint.startswith(_V1):
        return False
    return is_of_google(headers) or unquote(endpoint).endswith(METHODS)


def is_of_google(headers: Mapping[str, str]) -> bool:
    """Return whether a request is of one of Google's clients."""
    return any(name in headers for name in _CLIENT)


def read_target(endpoint: str, http_method: str) -> Target | None:
    """Return the target of a path, still encoded; None for a resource that is not a model."""
    resource = unquote(endpoint.partition("/")[2].partition("/")[2])
    method = ""
    if http_method == "POST":
        resource, colon, name = resource.rpartition(":")
        method = colon + name
    collection, _, model = resource.partition("/")
    if collection == "tunedModels" and model:
        return Target(resource, method)
    return Target(model, method) if collection == "models" and (model or not method) else None


def alt_from(query: Mapping[str, str]) -> str:
    """Return the requested format of a response, which may be unknown.

    Google's older clients send `$alt=json;enum-encoding=int`.
    """
    return (query.get("alt") or query.get("$alt") or "json").partition(";")[0].lower()


def check_alt(alt: str, method: str) -> None:
    """Raise BadRequest for a format that the method does not have."""
    known = ("json", "sse") if method == STREAM else ("json",)
    if alt not in known:
        raise BadRequest(f"alt: must be {' or '.join(known)}, not {alt[:40]!r}.", param="alt")


def bound_fields(target: Target, alt: str) -> dict[str, Any]:
    """Return the fields of a request that its URL has, with which it is recorded.

    `model` is a field of Google's request message, too, and a path has its value; the API key of a URL is no field. A field
    `stream` of a body has no effect.
    """
    streamed = {"stream": True, "alt": alt} if target.method == STREAM else {"stream": False}
    return {"model": target.model, **streamed}


def body_to_count(body: Json, target: Target) -> Json:
    """Return the request of which the tokens are counted: contents, or a whole request. Raises InvalidValue for both."""
    whole = optional(an_object, body, _WHOLE)
    if whole is not None and at(body, "contents")[0] is not None:
        raise refusal(_WHOLE, "must not be present together with contents")
    return {**(body if whole is None else whole), **bound_fields(target, "json")}


class Gemini(Translator):
    """`generateContent` and `streamGenerateContent`. `is_array`: an error is in an array, as chunks of such a stream are."""

    name: DialectName = "gemini"
    read = staticmethod(read)

    def __init__(self, *, is_array: bool = False) -> None:
        self._is_array = is_array

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the ids of function calls: the client's copies lack the sampled text of their arguments."""
        return References(calls=call_ids_from(body))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> GeminiRenderer:
        return GeminiRenderer(identity, is_array=body.get("alt") != "sse", shows_thoughts=shows_thoughts(body))

    def error(self, error: ProxyError) -> bytes:
        return self._written(error_for(error))

    def engine_error(self, status: int, text: str) -> bytes:
        return self._written(error_object(status, engine_message(text)))

    def _written(self, error: Json) -> bytes:
        return orjson.dumps([error] if self._is_array else error)

    def is_spoken(self, endpoint: str, headers: Mapping[str, str]) -> bool:
        return is_of_google(headers)

    def models(self, entries: Sequence[Json]) -> Json:
        return {"models": [self.model(entry) for entry in entries]}

    def model(self, entry: Json) -> Json:
        """Return one model, with its context window as both limits if it is known."""
        name, longest = str(entry.get("id")), entry.get("max_model_len")
        limits = {"inputTokenLimit": longest, "outputTokenLimit": longest} if type(longest) is int else {}
        methods = ["generateContent", "countTokens"]
        return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods, **limits}


GEMINI: Final = Gemini()
GEMINI_ARRAY: Final = Gemini(is_array=True)
