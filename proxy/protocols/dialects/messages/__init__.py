"""Anthropic's Messages API, translated to chat."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import CallIdentity, DialectName, Json, References, Translator, engine_message
from proxy.protocols.dialects.messages.renderer import MessagesRenderer, error_object
from proxy.protocols.dialects.messages.request import read, tool_call_ids

# By status, each of Anthropic's API.
_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
# By the refused parameter. The SDK's tool runner requests a thread first, and continues without one if the error has these
# details (anthropic 2.12, lib/threads).
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


class Messages(Translator):
    """`POST /v1/messages`."""

    name: DialectName = "messages"
    has_system_turns = True
    read = staticmethod(read)

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the ids of tool calls: the client's copies lack the sampled text of their arguments."""
        return References(calls=sorted(tool_call_ids(body)))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> MessagesRenderer:
        return MessagesRenderer(identity, body.get("stop_sequences"))

    def error(self, error: ProxyError) -> bytes:
        """Return Anthropic's error body, which has no field for a parameter: the message names it."""
        details = {"details": _DETAILS[error.param]} if error.param in _DETAILS else {}
        return orjson.dumps(error_object(type_for(error.status), error.message, **details))

    def engine_error(self, status: int, text: str) -> bytes:
        return orjson.dumps(error_object(type_for(status), engine_message(text)))

    def is_spoken(self, endpoint: str, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or endpoint.startswith("/v1/messages/")

    def models(self, entries: Sequence[Json]) -> Json:
        data = [self.model(entry) for entry in entries]
        ids = [entry["id"] for entry in data] or [None]
        return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    def model(self, entry: Json) -> Json:
        """Return one model. Unknown values are null; an unknown creation time is the epoch."""
        name, created, longest = str(entry.get("id")), entry.get("created"), entry.get("max_model_len")
        moment = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 1 << 37 else 0, UTC)
        longest = longest if type(longest) is int else None
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": longest,
            "max_tokens": longest,
        }


def type_for(status: int) -> str:
    """Return the error type of a status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


MESSAGES: Final = Messages()
