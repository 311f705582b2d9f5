"""Google's Gemini API, translated to chat.

    paths               models and methods in paths        renderer     a response, whole or streamed
    request             a request, read as a chat call     candidates   parts, finish reasons, token counts
    contents            its conversation, as messages      signatures   thought signatures
    function_responses  results, assigned to their calls   errors       error bodies and statuses
    media               images, audio, video, texts        models_list  models
    tools, schemas      functions and their schemas        fields       spellings of Google's JSON

docs/dialects.md lists what neither side can represent.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import DialectName, engine_message
from proxy.protocols.dialects.gemini.contents import call_ids_from
from proxy.protocols.dialects.gemini.errors import error_for, error_object
from proxy.protocols.dialects.gemini.renderer import GeminiRenderer
from proxy.protocols.dialects.gemini.request import read
from proxy.protocols.dialects.translation import CallIdentity, Json, References, ResolvedReferences, TranslationOptions

__all__ = ["GEMINI", "GEMINI_ARRAY", "Gemini"]

_NONE: Final = ResolvedReferences()


class Gemini:
    """`generateContent` and `streamGenerateContent`. `is_array`: an error is in an array, as chunks of such a stream are."""

    name: DialectName = "gemini"

    def __init__(self, *, is_array: bool = False) -> None:
        self._is_array = is_array

    def read(self, body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = _NONE) -> Json:
        """Return the chat body. `resolved.items` are sampled calls of earlier responses, by their rendered ids."""
        return read(body, options, resolved)

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the ids of function calls: the client's copies lack the sampled text of their arguments."""
        return References(calls=call_ids_from(body))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> GeminiRenderer:
        """Return the renderer of the response to this body."""
        return GeminiRenderer(body, identity)

    def error(self, error: ProxyError) -> bytes:
        """Return Google's error body."""
        return self._written(error_for(error))

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the engine's message in Google's error body."""
        return self._written(error_object(status, engine_message(text)))

    def _written(self, error: Json) -> bytes:
        return orjson.dumps([error] if self._is_array else error)


GEMINI: Final = Gemini()
GEMINI_ARRAY: Final = Gemini(is_array=True)
