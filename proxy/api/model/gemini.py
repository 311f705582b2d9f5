"""The routes of the Gemini API: calls, token counts and models. Paths name the model; the query may contain the API key."""

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from proxy.api.auth import check_minted, google_key, identify
from proxy.api.body import read_body, read_bytes
from proxy.api.context import Context
from proxy.api.http import ERROR_DIALECT, CallRoute, json_response
from proxy.api.model.call import ModelRequest
from proxy.api.model.calls import handle_call
from proxy.api.model.unrecorded import find_model, forward, models_and_aliases, tokens_of, unknown_path
from proxy.api.rollout_id import id_from_path
from proxy.errors import InvalidValue
from proxy.protocols.dialects.gemini import GEMINI, GEMINI_ARRAY
from proxy.protocols.dialects.gemini.paths import (
    COUNT,
    GENERATE,
    STREAM,
    STREAM_ARRAY,
    Target,
    alt_from,
    bound_fields,
    check_alt,
    read_target,
)
from proxy.protocols.dialects.validation import an_object, at, optional
from proxy.upstream import least_loaded
from proxy.upstream.client import body_of, json_of

_MODELS: Final = "/v1/models"  # of the engine
_WHOLE: Final = "generateContentRequest"


async def answer_gemini(
    request: web.Request, context: Context, path: str, segment: str | None, calls: Mapping[str, CallRoute]
) -> web.StreamResponse:
    """Handle a request of the Gemini API; `segment` of its path names the rollout. Raises ProxyError."""
    target = read_target(path, request.method)
    alt = alt_from(request.query)
    is_array = target is not None and target.method == STREAM and alt != "sse"
    request[ERROR_DIALECT] = GEMINI_ARRAY if is_array else GEMINI
    caller = await identify(request, context, other_key=google_key(request))
    rollout_id = None if segment is None else id_from_path(segment)
    check_minted(caller.minted, rollout_id)
    if path in context.settings.engines.passthrough:
        return await forward(request, context, path, await read_bytes(request))
    if target is None:
        raise unknown_path(request.method, path)
    if request.method == "GET":
        return await _show_models(request, context, target.model)
    if request.method != "POST" or target.method not in {GENERATE, STREAM, COUNT}:
        raise unknown_path(request.method, path)
    check_alt(alt, target.method)
    if target.method == COUNT:
        return await _count_tokens(request, context, target)
    endpoint = STREAM_ARRAY if is_array else target.method
    call = ModelRequest(request, context, endpoint, rollout_id, caller, bound_fields(target, alt))
    return await handle_call(call, calls[endpoint])


async def _count_tokens(request: web.Request, context: Context, target: Target) -> web.Response:
    """Return the number of tokens of contents, or of a whole request. Raises UnprocessableRequest."""
    text = await read_bytes(request)

    def read() -> dict[str, Any]:
        body = read_body(text)
        whole = optional(an_object, body, _WHOLE)
        if whole is not None and at(body, "contents")[0] is not None:
            raise InvalidValue(f"{_WHOLE}: must not be present together with contents", param=_WHOLE)
        return {**(body if whole is None else whole), **bound_fields(target, "json")}

    return json_response({"totalTokens": await tokens_of(context, GENERATE, read, body_bytes=len(text))})


async def _show_models(request: web.Request, context: Context, name: str) -> web.Response:
    headers = list(request.headers.items())
    endpoints = least_loaded(context.upstream.endpoints, _MODELS)
    async with context.upstream.send_to_any(endpoints, "GET", _MODELS, headers=headers, body=None) as answer:
        if answer.status != 200:
            text = (await body_of(answer)).decode("utf-8", "replace")
            body = GEMINI.engine_error(answer.status, text)
            return web.Response(status=answer.status, body=body, content_type="application/json")
        models = await json_of(answer)
    listed = await models_and_aliases(context, headers, models)
    if not name:
        return json_response(GEMINI.models(listed))
    return json_response(GEMINI.model(find_model(listed, name, context.settings.models)))
