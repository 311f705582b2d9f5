"""Anthropic's Messages API, translated to chat.

    request         a request, read as a chat call        messages      its conversation, as chat messages
    tools           tools and tool choices                renderer      a response, whole or streamed
    events          blocks, events, stop reasons, usage   errors        error types and statuses
    models_list     models

docs/dialects.md lists what neither side can represent.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import DialectName, engine_message
from proxy.protocols.dialects.messages.errors import error_body
from proxy.protocols.dialects.messages.messages import tool_call_ids
from proxy.protocols.dialects.messages.renderer import MessagesRenderer
from proxy.protocols.dialects.messages.request import read
from proxy.protocols.dialects.translation import CallIdentity, Json, References, ResolvedReferences, TranslationOptions

__all__ = ["MESSAGES", "Messages"]

_NONE: Final = ResolvedReferences()


class Messages:
    """`POST /v1/messages`."""

    name: DialectName = "messages"

    def read(self, body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = _NONE) -> Json:
        """Return the chat body. `resolved.items` are sampled calls of earlier responses, by their rendered ids."""
        return read(body, options, resolved)

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the ids of tool calls: the client's copies lack the sampled text of their arguments."""
        return References(calls=sorted(tool_call_ids(body)))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> MessagesRenderer:
        """Return the renderer of the response to this body."""
        return MessagesRenderer(identity, body.get("stop_sequences"))

    def error(self, error: ProxyError) -> bytes:
        """Return Anthropic's error body."""
        return error_body(error.status, error.message, error.param)

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the engine's message in Anthropic's error body."""
        return error_body(status, engine_message(text))


MESSAGES: Final = Messages()
