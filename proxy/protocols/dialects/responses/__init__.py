"""OpenAI's Responses API, translated to chat."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import CallIdentity, DialectName, References, Translator, openai_error
from proxy.protocols.dialects.responses.renderer import ResponsesRenderer
from proxy.protocols.dialects.responses.request import call_ids_from, item_ids_from, read
from proxy.protocols.lenient_json import NotJson, read_json

# OpenAI's own; another status is an invalid request below 500, else a server error.
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE: Final = 2000  # characters of a response in no known error format


class Responses(Translator):
    """`POST /v1/responses`."""

    name: DialectName = "responses"
    read = staticmethod(read)

    def references(self, body: Mapping[str, Any]) -> References:
        previous, items = body.get("previous_response_id"), body.get("input")
        previous = previous if isinstance(previous, str) else None
        return References(previous, item_ids_from(items), call_ids_from(items))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> ResponsesRenderer:
        return ResponsesRenderer(body, identity)

    def error(self, error: ProxyError) -> bytes:
        return openai_error(error)

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the body of an engine's error: its message, param and code. vLLM and llama.cpp nest them, SGLang does not."""
        fields = _error_fields(text)
        message, param, code = fields.get("message"), fields.get("param"), fields.get("code")
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        if not isinstance(message, str) or not message:
            message = text.strip()[:_MAX_MESSAGE] or f"The engine returned status {status} without a message."
        return orjson.dumps(
            {
                "error": {
                    "message": message,
                    "type": kind,
                    "param": param if isinstance(param, str) else None,
                    "code": code if isinstance(code, str) else None,  # vLLM's and SGLang's repeat the status
                }
            }
        )


def _error_fields(text: str) -> dict[str, Any]:
    try:
        body, _ = read_json(text.encode("utf-8", "replace"))
    except NotJson:
        return {}
    inner = body.get("error") if isinstance(body, dict) and "error" in body else body
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else {}


RESPONSES: Final = Responses()
