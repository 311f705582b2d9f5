"""What clients read of failures: the shape of the API and dialect, and nothing of the installation.

Agents get no addresses, paths or exception texts. What an answer leaves out is logged under the id that the answer has.
"""

from typing import Final
from uuid import uuid4

from aiohttp import web

from proxy.control.access import MODEL_API, SESSION_API
from proxy.dialects.base import Spoken, openai_error
from proxy.errors import InternalError, ProxyError
from proxy.logs import LOG

SPOKEN: Final = web.RequestKey("spoken", Spoken)  # the dialect of a request, once its path was read


def internal_error(failure: BaseException, **fields: object) -> InternalError:
    """Log an exception that nothing expected, with `fields` and a new error id; return the error that names this id."""
    error_id = uuid4().hex
    LOG.error("internal error %s", error_id, exc_info=failure, extra={"fields": {"error_id": error_id, **fields}})
    error = InternalError(f"the proxy failed; its log has the details (error id {error_id})")
    error.error_id = error_id
    return error


def shown(request: web.Request, error: ProxyError) -> ProxyError:
    """Return the error as the client of this request may see it; what agents may not see is logged."""
    if error.public is None or not _is_of_an_agent(request):
        return error
    error_id = uuid4().hex
    LOG.warning("%s: %s", error.code, error.message, extra={"fields": {"error_id": error_id, "path": request.path}})
    return error.for_agents(f"error id {error_id}")


def error_answer(request: web.Request, error: ProxyError) -> web.Response:
    """Return the answer to a failure in the shape of the API, and the dialect, of the request."""
    error = shown(request, error)
    spoken = request.get(SPOKEN)
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.kind in {"rollout_limit", "rollout_closed"}:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients would wait and try again, which cannot help
    status = spoken.status(error) if spoken else error.status
    return web.Response(status=status, headers=headers, body=spoken.error(error) if spoken else openai_error(error))


def _is_of_an_agent(request: web.Request) -> bool:
    """Whether the request is not of the control API; one that no route matched is taken as an agent's."""
    resource = request.match_info.route.resource
    return resource is None or resource.canonical == MODEL_API or resource.canonical.startswith(f"{SESSION_API}/")
