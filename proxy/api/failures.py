"""Error responses in the format of the API and dialect of the request.

Agents get no addresses, paths or exception texts: these are logged under the error ID of the response.
"""

from collections.abc import Awaitable, Callable
from typing import Final
from uuid import uuid4

from aiohttp import web

from proxy.api.auth import MODEL_API, SESSION_API
from proxy.api.body import RESERVED
from proxy.api.context import CONTEXT
from proxy.errors import (
    BadRequest,
    Conflict,
    InternalError,
    LimitReached,
    NotFound,
    PlaybackMismatch,
    ProxyError,
    StoreUnavailable,
    UpgradeRequired,
)
from proxy.protocols.dialects.base import ErrorDialect, openai_error
from proxy.telemetry.logs import LOG
from storage.errors import StorageError

# Set when the first byte of a response is written: its status is final then.
RESPONSE_STARTED: Final = web.RequestKey("response_started", bool)
CLIENT_CLOSED_REQUEST: Final = 499  # in the log only, as in nginx
ERROR_DIALECT: Final = web.RequestKey("error_dialect", ErrorDialect)  # set once the path of a request is parsed


def internal_error(failure: BaseException, **fields: object) -> InternalError:
    """Log an unexpected exception with `fields` and a new error ID; return the error that names this ID."""
    error_id = uuid4().hex
    LOG.error("Internal error %s", error_id, exc_info=failure, extra={"fields": {"error_id": error_id, **fields}})
    error = InternalError(f"Internal error; the log of the proxy has the details (error id {error_id}).")
    error.error_id = error_id
    return error


def visible_error(request: web.Request, error: ProxyError) -> ProxyError:
    """Return the error as the client of this request may see it; details that agents may not see are logged."""
    if error.public is None or not _is_of_an_agent(request):
        return error
    error_id = uuid4().hex
    LOG.warning("%s: %s", error.code, error.message, extra={"fields": {"error_id": error_id, "path": request.path}})
    return error.for_agents(f"error id {error_id}")


def error_headers(request: web.Request, error: ProxyError) -> dict[str, str]:
    """Return the headers of an error response."""
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, UpgradeRequired):
        headers["Upgrade"] = "HTTP/1.1"  # RFC 9110, section 15.5.22
    if isinstance(error, Conflict | LimitReached | PlaybackMismatch) and _is_of_an_agent(request):
        headers["X-Should-Retry"] = "false"  # OpenAI's and Anthropic's clients would retry, which cannot succeed
    return headers


def _is_of_an_agent(request: web.Request) -> bool:
    """Return whether the request is not for the control API; an unmatched route counts as an agent's."""
    resource = request.match_info.route.resource
    return resource is None or resource.canonical in MODEL_API or resource.canonical.startswith(f"{SESSION_API}/")


@web.middleware
async def answer_failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn every exception into an error response of the API that was called; release the bytes of the body."""
    try:
        return await handler(request)
    except ProxyError as error:
        return _failed(request, error)
    except StorageError as error:
        return _failed(request, StoreUnavailable(f"The store is unavailable: {error}"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _failed(request, NotFound(f"{request.method} {request.path} is not supported; use {allowed}."))
    except web.HTTPNotFound:
        return _failed(request, NotFound(f"Path {request.path!r} not found."))
    except web.HTTPException as error:
        return _failed(request, BadRequest(f"Bad request: {error.reason}"))
    except Exception as failure:  # noqa: BLE001 - unexpected exceptions are logged and become a 500
        return _failed(request, internal_error(failure, path=request.path))
    finally:
        if (reserved := request.get(RESERVED)) is not None:
            reserved.release()


def _failed(request: web.Request, error: ProxyError) -> web.Response:
    """Return the error response in the format of the request's API and dialect.

    If a part of another response was written already, the connection is closed, so that it does not look complete.
    """
    if request.get(RESPONSE_STARTED) and request.transport is not None:
        request.transport.close()
    if CONTEXT in request.app:  # the standby application has none
        request.app[CONTEXT].metrics.errors.labels(error.code).inc()
    error = visible_error(request, error)
    dialect = request.get(ERROR_DIALECT)
    body = dialect.error(error) if dialect else openai_error(error)
    return web.Response(status=error.status, headers=error_headers(request, error), body=body)
