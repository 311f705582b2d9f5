"""Errors of the Responses API: OpenAI's format, with its types by status."""

from typing import Any, Final

import orjson

from proxy.errors import ProxyError
from proxy.protocols.dialects.base import openai_error
from proxy.protocols.lenient_json import NotJson, read_json

# OpenAI's own; what is not listed is an invalid request below 500, and a server's error from there on.
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST: Final = 2000  # of an answer that is no error of a known shape


def error(failure: ProxyError) -> bytes:
    """Return the body of an error of TokenTape."""
    return openai_error(failure)


def engine_error(status: int, text: str) -> bytes:
    """Return the body of an engine's error: its message, param and code. vLLM and llama.cpp nest them, SGLang does not."""
    told = _told(text)
    message, param, code = told.get("message"), told.get("param"), told.get("code")
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if not isinstance(message, str) or not message:
        message = text.strip()[:_LONGEST] or f"The engine returned status {status} without a message."
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


def _told(text: str) -> dict[str, Any]:
    """The fields of an engine's error; none, if that is nowhere to be found."""
    try:
        body, _ = read_json(text.encode("utf-8", "replace"))
    except NotJson:
        return {}
    inner = body.get("error") if isinstance(body, dict) and "error" in body else body
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else {}
