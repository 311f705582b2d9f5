"""Anthropic's Messages, by way of chat: requests read as chat calls, chat's answers told in its blocks and events.

    request     a body, read as a chat body        turns       its conversation, as chat messages
    tools       what it offers to call             blocks      what users send: text, images, documents, results
    telling     an answer, whole or streamed       told        the shapes of blocks and events
    arguments   texts of calls, told as objects    beginning   how far a text can be the beginning of one
    ending      stop reasons, usage                errors      types and statuses
    listing     models                             checked     values by their type, refused by their place

It must not know engines, sockets or the store. What chat cannot carry of it, and it of chat: docs/dialects.md.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import DialectName
from proxy.protocols.dialects.messages.errors import error_body, status_of, words_of
from proxy.protocols.dialects.messages.renderer import MessagesRenderer
from proxy.protocols.dialects.messages.request import read
from proxy.protocols.dialects.messages.tool_arguments import named, unrestorable_calls
from proxy.protocols.dialects.translation import CallIdentity, Json, References, ResolvedReferences, TranslationOptions

__all__ = ["MESSAGES", "Messages"]

_NONE: Final = ResolvedReferences()


class Messages:
    """`POST /v1/messages`."""

    name: DialectName = "messages"

    def read(self, body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = _NONE) -> Json:
        """The chat body. `earlier.items` are calls of earlier replies as sampled, by the id they were told by."""
        return read(body, options, resolved)

    def references(self, body: Mapping[str, Any]) -> References:
        """Return tool calls: what the client sends back does not carry the sampled text of their arguments."""
        return References(calls=sorted(named(body)))

    def renderer(self, body: Mapping[str, Any], told: CallIdentity) -> MessagesRenderer:
        """Return the renderer of the response to this body."""
        return MessagesRenderer(told, body.get("stop_sequences"))

    def unrestorable_calls(
        self, body: Mapping[str, Any], told: CallIdentity, response: Mapping[str, Any]
    ) -> Mapping[str, Json]:
        """Those whose text is not how objects are spelt here."""
        message = response["choices"][0].get("message") or {}
        return {name: call["function"] for name, call in unrestorable_calls(message, told.step_id).items()}

    def status(self, error: ProxyError) -> int:
        """Return the status for a client of this dialect."""
        return status_of(error)

    def error(self, error: ProxyError) -> bytes:
        """Return Anthropic's error body."""
        return error_body(status_of(error), error.message, error.param)

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the engine's message in Anthropic's error body."""
        return error_body(status, words_of(text))


MESSAGES: Final = Messages()
