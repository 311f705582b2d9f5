"""OpenAI's Responses API, translated to chat.

    request        a request, read as a chat call      renderer         a response, as events or whole
    input_items    input items, as chat messages       events           events, and items while they are streamed
    content_parts  content parts                       response_object  the response object
    tools          tools and tool choices              item_ids         ids of responses and items
    history        previous responses and items        errors           errors in OpenAI's format
    validation     type checks for fields

docs/exactness.md lists what it cannot represent.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import DialectName
from proxy.protocols.dialects.responses.errors import engine_error, error
from proxy.protocols.dialects.responses.history import call_references, item_references
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
        """Return the chat body."""
        return read(body, options, resolved)

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the previous response, items by id, and tool calls."""
        previous = body.get("previous_response_id")
        return References(previous if isinstance(previous, str) else None, item_references(body), call_references(body))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> ResponseRenderer:
        """Return the renderer of the response."""
        return ResponsesRenderer(body, identity)

    def error(self, error_: ProxyError) -> bytes:
        """Return OpenAI's error body."""
        return error(error_)

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the engine's message in OpenAI's error body."""
        return engine_error(status, text)


RESPONSES: Final[Translator] = Responses()
