"""The routes of the model API.

Every path that is not a route of the control API is handled here. Calls that sample have a `CallRoute`, all others a
`ModelRoute`. Other paths are 404, unless `engines.passthrough` lists them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from aiohttp import web

from proxy.api.auth import check_minted, google_key, identify
from proxy.api.body import read_body, read_bytes
from proxy.api.context import CONTEXT, Context
from proxy.api.health import show_health
from proxy.api.http import ERROR_DIALECT, CallRoute, json_response
from proxy.api.model.call import ModelRequest
from proxy.api.model.calls import handle_call
from proxy.api.model.references import STORED, answer_stored
from proxy.api.model.unrecorded import (
    COUNT,
    count_tokens,
    find_model,
    forward,
    models_and_aliases,
    show_models,
    tokens_of,
    unknown_path,
)
from proxy.api.rollout_id import id_from_path
from proxy.errors import BadRequest, NotFound, UpgradeRequired
from proxy.protocols.dialects import gemini
from proxy.protocols.plan import error_dialect_for
from proxy.upstream import least_loaded
from proxy.upstream.client import body_of, json_of

Handler: TypeAlias = Callable[[ModelRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """An endpoint that does not sample: its method (None: any), its handler, and whether control keys may call it."""

    method: str | None
    handle: Handler
    takes_control_keys: bool = False


async def _show_health(call: ModelRequest) -> web.StreamResponse:
    return await show_health(call.request)


MODEL_ROUTES: Final[Mapping[str, ModelRoute]] = {
    COUNT: ModelRoute("POST", count_tokens),
    "/health": ModelRoute("GET", _show_health),  # of a rollout: Atropos' VLLMServer requests it once a second
    "/v1/models": ModelRoute("GET", show_models),
}
_ROLLOUTS: Final = ("/rollouts/", "/sessions/")  # before the id of a rollout
_PREFIXES: Final[Mapping[str, ModelRoute]] = {
    STORED: ModelRoute(None, answer_stored),
    "/v1/models/": ModelRoute("GET", show_models),
}

# What an application serves: the endpoints that sample, and the others.
CALLS = web.AppKey("call_routes", Mapping[str, CallRoute])
OTHERS = web.AppKey("model_routes", Mapping[str, ModelRoute])


async def answer(request: web.Request) -> web.StreamResponse:
    """Handle a request of the model API. Raises ProxyError."""
    app = request.app
    context, call_routes = app[CONTEXT], app[CALLS]
    raw_path, _, _ = request.raw_path.partition("?")
    endpoint, segment = parse_path(raw_path)
    calls, route = call_routes.get(endpoint), None
    if calls is None and gemini.is_gemini(endpoint, request.headers):
        return await _answer_gemini(request, context, endpoint, segment, call_routes)
    errors = calls.errors if calls is not None else error_dialect_for(endpoint, request.headers)
    if errors is not None:
        request[ERROR_DIALECT] = errors
    if calls is None:
        route = _route_of(app[OTHERS], endpoint)
    caller = await identify(
        request,
        context,
        takes_control_keys=route is not None and route.takes_control_keys,
        other_key=google_key(request) if errors is gemini.GEMINI else None,
    )
    rollout_id = None if segment is None else id_from_path(segment)
    if caller.minted is not None:
        check_minted(caller.minted, rollout_id)
    call = ModelRequest(request, context, endpoint, rollout_id, caller)
    if calls is not None and request.method == "POST":
        return await handle_call(call, calls)
    if route is not None and route.method in (None, request.method):
        return await route.handle(call)
    if endpoint in context.settings.engines.passthrough:
        return await forward(request, context, endpoint, await read_bytes(request))
    raise (unknown_path(request.method, endpoint) if calls is None else _other_method(request, endpoint))


def parse_path(raw_path: str) -> tuple[str, str | None]:
    """Return the endpoint as engines know it, and the segment of a path that names the rollout, still encoded, if any.

    Paths are `/rollouts/{id}/v1/…`, `/sessions/{id}/v1/…` or `/v1/…`; `raw_path` is encoded and without the query.
    """
    for prefix in _ROLLOUTS:
        if raw_path.startswith(prefix):
            segment, slash, rest = raw_path.removeprefix(prefix).partition("/")
            if slash:
                return f"/{rest}", segment
    return raw_path, None


def _route_of(routes: Mapping[str, ModelRoute], endpoint: str) -> ModelRoute | None:
    if (route := routes.get(endpoint)) is not None:
        return route
    return next((route for prefix, route in _PREFIXES.items() if endpoint.startswith(prefix)), None)


def _other_method(request: web.Request, endpoint: str) -> BadRequest:
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return UpgradeRequired(f"{endpoint} has no WebSocket; use POST.")
    return NotFound(f"{request.method} {endpoint} is not supported; use POST.")


async def _answer_gemini(
    request: web.Request, context: Context, path: str, segment: str | None, calls: Mapping[str, CallRoute]
) -> web.StreamResponse:
    """Handle a request of the Gemini API; `segment` of its path names the rollout. Raises ProxyError."""
    target, alt = gemini.read_target(path, request.method), gemini.alt_from(request.query)
    is_array = target is not None and target.method == gemini.STREAM and alt != "sse"
    request[ERROR_DIALECT] = gemini.GEMINI_ARRAY if is_array else gemini.GEMINI
    caller = await identify(request, context, other_key=google_key(request))
    rollout_id = None if segment is None else id_from_path(segment)
    check_minted(caller.minted, rollout_id)
    if path in context.settings.engines.passthrough:
        return await forward(request, context, path, await read_bytes(request))
    if target is None:
        raise unknown_path(request.method, path)
    if request.method == "GET":
        return await _show_gemini_models(request, context, target.model)
    if request.method != "POST" or target.method not in gemini.METHODS:
        raise unknown_path(request.method, path)
    gemini.check_alt(alt, target.method)
    if target.method == gemini.COUNT:
        text = await read_bytes(request)
        tokens = await tokens_of(
            context, gemini.GENERATE, lambda: gemini.body_to_count(read_body(text), target), body_bytes=len(text)
        )
        return json_response({"totalTokens": tokens})
    endpoint = gemini.STREAM_ARRAY if is_array else target.method
    call = ModelRequest(request, context, endpoint, rollout_id, caller, gemini.bound_fields(target, alt))
    return await handle_call(call, calls[endpoint])


async def _show_gemini_models(request: web.Request, context: Context, name: str) -> web.Response:
    headers = list(request.headers.items())
    endpoints = least_loaded(context.upstream.endpoints, "/v1/models")
    async with context.upstream.send_to_any(endpoints, "GET", "/v1/models", headers=headers, body=None) as answer:
        if answer.status != 200:
            text = (await body_of(answer)).decode("utf-8", "replace")
            body = gemini.GEMINI.engine_error(answer.status, text)
            return web.Response(status=answer.status, body=body, content_type="application/json")
        models = await json_of(answer)
    listed = await models_and_aliases(context, headers, models)
    if not name:
        return json_response(gemini.GEMINI.models(listed))
    return json_response(gemini.GEMINI.model(find_model(listed, name, context.settings.models)))
