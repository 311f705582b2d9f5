"""A chat response, rendered in Google's format: whole, as server-sent events, or as a JSON array.

Each chunk of a stream is a response with the new parts. Function calls are whole parts, and belong to the last chunk: an agent
runs a function only for a stored step.

Invariant: the parts of all chunks, with adjacent texts joined, are the parts of the whole response.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.protocols.dialects.gemini.candidates import CandidateParts, content_of, ending_of, usage_from
from proxy.protocols.dialects.gemini.errors import error_from, error_object
from proxy.protocols.dialects.gemini.request import shows_thoughts
from proxy.protocols.dialects.translation import CallIdentity, Json
from proxy.protocols.sse import StreamFormat

# Clients of Google's read a comment as JSON (google-genai 3.4); an empty line is nothing to them.
_EVENTS: Final = StreamFormat("text/event-stream; charset=utf-8", b"\r\n\r\n")
_ARRAY: Final = StreamFormat("application/json; charset=UTF-8", b"\n")
_NO_RESPONSE: Final = "The engine's response ended before it began."


class GeminiRenderer:
    """Renders the response to one call."""

    def __init__(self, body: Mapping[str, Any], identity: CallIdentity) -> None:
        self._identity = identity
        self._shows_thoughts = shows_thoughts(body)
        self._is_array = body.get("alt") != "sse"
        self._is_begun = False
        self._candidates: dict[int, CandidateParts] = {}
        self.stream_format = _ARRAY if self._is_array else _EVENTS

    def whole(self, response: Json) -> Json:
        """Return an unstreamed response."""
        candidates = []
        for choice in _choices(response):
            message, parts = choice.get("message") or {}, self._parts(choice)
            found = [*parts.take(message), *parts.end(message, must_have_one=False)]
            candidates.append(_candidate(choice, found) | ending_of(choice))
        return self._response(candidates, response.get("usage"))

    def feed(self, chunk: Json) -> bytes:
        """Return the chunk with the new parts, if there are any."""
        candidates = [
            _candidate(choice, parts)
            for choice in chunk.get("choices") or ()
            if (parts := self._parts(choice).take(choice.get("delta") or {}))
        ]
        return self._written(self._response(candidates, None)) if candidates else b""

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the last chunk, with the end of each candidate, or an error."""
        if error is not None:
            last = error_from(error)
        elif response is None:
            last = error_object(500, _NO_RESPONSE)
        else:
            candidates = []
            for choice in _choices(response):
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
        """Return a chunk as an event or as an entry of the array."""
        begins, self._is_begun = not self._is_begun, True
        text = orjson.dumps(response)
        if self._is_array:
            return (b"[" if begins else b",\r\n") + text
        return b"data: " + text + b"\r\n\r\n"


def _choices(response: Mapping[str, Any]) -> list[Json]:
    """Return the choices; a response that was aborted at its beginning may have none."""
    return response.get("choices") or [{}]


def _candidate(choice: Mapping[str, Any], parts: list[Json]) -> Json:
    return {"content": content_of(parts), "index": choice.get("index", 0)}
