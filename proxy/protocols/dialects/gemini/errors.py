"""Errors in Google's format, and its status names (google.rpc.Code)."""

from collections.abc import Sequence
from typing import Any, Final

import orjson

from proxy.errors import LimitReached, ProxyError
from proxy.protocols.dialects.base import engine_message
from proxy.protocols.dialects.translation import Json

_NAMES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE: Final = "type.googleapis.com/google.rpc."
_DOMAIN: Final = "tokentape"


def name_for(status: int) -> str:
    """Return the name of a status."""
    return _NAMES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")


def error_object(status: int, message: str, *, name: str | None = None, details: Sequence[Json] = ()) -> Json:
    """Return an error, as in bodies and streams."""
    error: Json = {"code": status, "message": message, "status": name or name_for(status)}
    return {"error": {**error, "details": list(details)} if details else error}


def error_for(error: ProxyError) -> Json:
    """Return an error of TokenTape.

    Its details have its code, the field of an invalid value, and the delay after which a retry may succeed.
    """
    details: list[Json] = [{"@type": f"{_TYPE}ErrorInfo", "reason": error.code.upper(), "domain": _DOMAIN}]
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if error.retry_after_s is not None and not isinstance(error, LimitReached):
        details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{error.retry_after_s}s"})
    return error_object(error.status, error.message, details=details)


def error_from(text: str) -> Json:
    """Return the error of an engine's error event, or of a body of `error_for`, for a stream that has begun."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # an error body of a stream as an array
        text = orjson.dumps(value).decode()
    inner = value.get("error") if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return error_object(500, engine_message(text))
    code = inner.get("code")
    status = code if type(code) is int and 400 <= code < 600 else 500
    name, details = inner.get("status"), inner.get("details")
    return error_object(
        status,
        engine_message(text),
        name=name if isinstance(name, str) else None,
        details=details if isinstance(details, list) else (),
    )
