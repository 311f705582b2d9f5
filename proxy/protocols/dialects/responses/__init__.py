"""OpenAI's Responses, by way of chat.

Holds the dialect, a module to each of its matters:

    request     a call, read as a chat call          telling    an answer, as events or whole
    items       input items, as chat messages        events     events, and items while they are told
    content     content parts                        output     the response object
    tools       tools and tool choices               names      what answers and items are called
    freeform    custom tools, as functions           reasoning  thoughts, open and sealed
    history     answers before, and input items      errors     failures, in OpenAI's shape
    checking    fields of the right type

It must not know engines, sockets or the store. What it cannot carry is listed in docs/exactness.md.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import DialectName
from proxy.protocols.dialects.responses.errors import engine_error, error
from proxy.protocols.dialects.responses.history import call_references, item_references, unrestorable_calls
from proxy.protocols.dialects.responses.renderer import ResponsesRenderer
from proxy.protocols.dialects.responses.request import read
from proxy.protocols.dialects.translation import (
    CallIdentity,
    Json,
    References,
    ResolvedReferences,
    ResponseRenderer,
    TranslationOptions,
    Translator,
)


class Responses:
    """`POST /v1/responses`. See `proxy.protocols.dialects.translation.Translator`."""

    name: DialectName = "responses"

    def read(
        self,
        body: Mapping[str, Any],
        options: TranslationOptions,
        resolved: ResolvedReferences = ResolvedReferences(),  # noqa: B008 - frozen
    ) -> Json:
        """The chat body."""
        return read(body, options, resolved)

    def references(self, body: Mapping[str, Any]) -> References:
        """The answer before, items by their ids, and calls of custom tools."""
        answer = body.get("previous_response_id")
        return References(answer if isinstance(answer, str) else None, item_references(body), call_references(body))

    def renderer(self, body: Mapping[str, Any], told: CallIdentity) -> ResponseRenderer:
        """How the answer is told."""
        return ResponsesRenderer(body, told)

    def unrestorable_calls(
        self, body: Mapping[str, Any], told: CallIdentity, response: Mapping[str, Any]
    ) -> Mapping[str, Json]:
        """All: clients of frameworks spell arguments anew, and the input of a custom tool is a part of them."""
        return unrestorable_calls(told, body, response)

    def status(self, error_: ProxyError) -> int:
        """Its own."""
        return error_.status

    def error(self, error_: ProxyError) -> bytes:
        """OpenAI's shape."""
        return error(error_)

    def engine_error(self, status: int, text: str) -> bytes:
        """OpenAI's shape, the engine's words."""
        return engine_error(status, text)


RESPONSES: Final[Translator] = Responses()
