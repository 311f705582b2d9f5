"""All routes of both APIs, and their OpenAPI description at `/openapi.json`.

Each route is declared beside its handler. The model API finds its handlers itself, so its routes are described here.
"""

from importlib.metadata import version
from typing import Any, Final

from aiohttp import web
from pydantic.json_schema import models_json_schema

from proxy.api.compat.atropos_sessions import SESSION_CALL_ROUTES, SESSION_ROUTES
from proxy.api.compat.osmosis import COMPLETED, DISPATCH_ROUTES
from proxy.api.compat.uni_agent import UNI_AGENT_ROUTES
from proxy.api.control import CONTROL_ROUTES
from proxy.api.requests import Route, json_response, parameters, route
from proxy.api.ui.routes import PAGE_ROUTES
from proxy.protocols.dialects import DIALECTS, TRANSLATORS
from proxy.protocols.dialects.gemini import GENERATE, STREAM

_REF: Final = "#/components/schemas/{model}"
_PREFIXES: Final = ("", "/rollouts/{rollout_id}", "/sessions/{rollout_id}")
_CALLED: Final = (200, 400, 401, 403, 408, 409, 413, 422, 429, 502, 503, 504)
_FOUND: Final = (200, 400, 401, 403, 404, 503)
_COUNTED: Final = (*_FOUND, 413, 502, 504)
_COMPLETED: Final = (200, 400, 401, 403, 409, 413, 422)
_STORED: Final = "/v1/responses/{response_id}"


def _below(prefix: str) -> list[Route]:
    """Return the routes of the model API, below this prefix."""
    translated = {path: f"{it.name} dialect, translated to chat" for path, it in TRANSLATORS.items()}
    translated |= {f"/v1beta/models/{{model}}{it}": "gemini dialect, translated to chat" for it in (GENERATE, STREAM)}
    dialects = {path: f"{dialect.name} dialect" for path, dialect in DIALECTS.items()} | translated
    described = (
        *(("post", path, f"Make a recorded call in the {what}.", _CALLED) for path, what in dialects.items()),
        ("post", COMPLETED, "Report the result of a rollout, as a rollout server.", _COMPLETED),
        ("post", "/v1/messages/count_tokens", "Count the tokens of a Messages call with the engine's tokenizer.", _COUNTED),
        (
            "post", "/v1beta/models/{model}:countTokens",
            "Count the tokens of a Gemini call with the engine's tokenizer.", _COUNTED,
        ),
        ("get", "/v1beta/models", "List the engine's models and their configured aliases for Gemini clients.", _FOUND),
        ("get", "/v1beta/models/{model}", "Get a model for Gemini clients.", _FOUND),
        ("get", _STORED, "Get a stored response of the Responses API.", _FOUND),
        ("delete", _STORED, "Hide a response from agents; its step is kept.", _FOUND),
        ("get", f"{_STORED}/input_items", "List the input items of a response.", _FOUND),
    )  # fmt: skip
    return [route(method, prefix + path, None, summary, *statuses) for method, path, summary, statuses in described]


async def show_openapi(_request: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return json_response(describe())


# The routes of the control API. Their paths take precedence over the paths of the model API.
CONTROLLING: Final[tuple[Route, ...]] = (
    *CONTROL_ROUTES,
    *DISPATCH_ROUTES,
    *UNI_AGENT_ROUTES,
    route("get", "/openapi.json", show_openapi, "Get this description."),
    *PAGE_ROUTES,
)
ROUTES: Final[tuple[Route, ...]] = (
    *CONTROLLING,
    *(it for prefix in _PREFIXES for it in _below(prefix)),
    *SESSION_ROUTES,
    *SESSION_CALL_ROUTES,
    *(route("get", f"{prefix}/health", None, "Check that the process is alive.") for prefix in _PREFIXES[1:]),
    route("get", "/v1/models", None, "List the engine's models and their configured aliases.", 200, 401, 503),
    route("get", "/v1/models/{model}", None, "Get a model.", 200, 401, 404, 503),
)


def describe() -> dict[str, Any]:
    """Return the OpenAPI document."""
    bodies = [(it.body, "validation") for it in ROUTES if it.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for described in ROUTES:
        paths.setdefault(described.path, {})[described.method] = _operation(described)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TokenTape", "version": version("tokentape"), "summary": "A recording reverse proxy for RL."},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(described: Route) -> dict[str, Any]:
    named = [part[1:-1] for part in described.path.split("/") if part.startswith("{")]
    shown = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
    query = {} if described.query is None else parameters(described.query)
    shown += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    operation: dict[str, Any] = {
        "summary": described.summary,
        "parameters": shown,
        "responses": {str(status): {"description": _MEANINGS[status]} for status in described.statuses},
    }
    if described.body is not None:
        schema = {"$ref": _REF.format(model=described.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_MEANINGS = {
    200: "success",
    201: "created",
    202: "accepted",
    204: "deleted, or did not exist",
    302: "redirect",
    304: "not modified",
    308: "permanent redirect",
    400: "malformed request",
    401: "missing or invalid API key",
    403: "the API key does not permit this request",
    404: "not found",
    408: "timed out while reading the request body",
    409: "conflict with the current state",
    413: "request too large",
    422: "invalid value",
    429: "limit reached",
    500: "the engine returned no response (in the format of Atropos' proxy)",
    502: "the engine disconnected",
    503: "the store or the engines are unreachable",
    504: "the engine timed out",
}
