"""Errors in Anthropic's format.

Anthropic's errors have a type for each status of its API, and no field for a parameter: the message names it.
"""

from typing import Any, Final

import orjson

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# By the refused parameter. The SDK's tool runner requests a thread first, and continues without one if the error has these
# details (anthropic 2.12, lib/threads).
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def type_for(status: int) -> str:
    """Return the error type of a status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error body."""
    return orjson.dumps(error_object(type_for(status), message, param))


def error_object(kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error object, as in bodies and events."""
    details = {"details": _DETAILS[param]} if param in _DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
