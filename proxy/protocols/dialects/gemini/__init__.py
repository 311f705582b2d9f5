"""Google's Gemini API, translated to chat.

    paths       models and methods in paths
    request     a request, read as a chat call: its configuration, functions and schemas
    contents    its conversation, as messages: media, calls, their results and thought signatures
    renderer    a response, whole or streamed, and errors

docs/dialects.md lists what neither side can represent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import CallIdentity, DialectName, Json, References, Translator, engine_message
from proxy.protocols.dialects.gemini.contents import call_ids_from
from proxy.protocols.dialects.gemini.paths import is_of_google
from proxy.protocols.dialects.gemini.renderer import GeminiRenderer, error_for, error_object
from proxy.protocols.dialects.gemini.request import read, shows_thoughts

__all__ = ["GEMINI", "GEMINI_ARRAY", "Gemini"]


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
