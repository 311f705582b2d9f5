"""Atropos' proxy (296a0bc): routes that create, list and delete sessions, and calls of agents within a session.

A session is a rollout in the store, so every replica serves it. Engines are those of the configuration; no request adds one,
and requests are never sent to a URL from a request. Completions, models, streams and concurrent calls, which its proxy lacks,
are served as well.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.api.adapters import CallRoute
from proxy.api.auth import SESSION_API, Caller, check_minted, identify
from proxy.api.body import read_body, read_bytes
from proxy.api.compat.atropos.session import (
    TERMS,
    CreateSession,
    SchemaFault,
    Setup,
    deleted_metadata,
    error_body,
    is_session_id,
    nodes_from,
    read_as,
    read_session_chat,
    session_id,
    terms_from,
)
from proxy.api.context import CONTEXT, Context
from proxy.api.failures import error_headers, visible_error
from proxy.api.health import healthy_engines
from proxy.api.http import RESPONSE_STARTED, json_response
from proxy.api.model.call import ModelRequest
from proxy.api.model.calls import handle_call
from proxy.api.model.routes import CALLS
from proxy.api.model.unrecorded import show_models
from proxy.api.requests import Handler, Route, route, update_rollout
from proxy.config.addresses import base_url
from proxy.errors import BadRequest, Conflict, EngineError, NotFound, ProxyError, StoreUnavailable
from proxy.export import Inexpressible
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines.tokenizer_api import read_ids, render_request
from proxy.protocols.translated_call import CHAT
from proxy.rollouts.rollout import Rollout, read_rollout, read_rollouts, write_fields
from proxy.rollouts.steps import aside, facts_of, read_steps
from proxy.upstream import Endpoint, choose, preferred
from proxy.upstream.client import body_of, json_of
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from proxy.upstream.tokenizers import detokenize_at_engine
from storage.errors import StorageError

_COUNT_TIMEOUT_S: Final = 2
_MODEL_TIMEOUT_S: Final = 2
_CHAT_ROUTE: Final = CallRoute(DIALECTS[CHAT], (read_session_chat,))


class NoBaseUrl(ProxyError):
    """A server without a URL; Atropos' proxy responds with 500."""


class NotRendered(BadRequest):
    """A prompt could not be rendered; the message has the reason."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"Failed to render prompt: {reason}")


async def show_health(request: web.Request) -> web.Response:
    """`GET /health`: the response of TokenTape with the fields of Atropos' proxy."""
    context = request.app[CONTEXT]
    engines, model, sessions = await asyncio.gather(healthy_engines(context), _model(context), _count_sessions(context))
    healthy = sum(engines.values())
    payload = {
        "status": "ok",
        "model": model,
        "sessions": sessions,
        "servers": len(engines),
        "healthy_servers": healthy,
    }
    return json_response(payload)


async def set_up(request: web.Request) -> web.Response:
    """`POST /setup`: check that the named servers are configured engines. Other servers are never used."""
    context = request.app[CONTEXT]
    text = await read_bytes(request)
    setup = await off_loop(len(text), LARGE_BYTES, lambda: read_as(Setup, read_body(text)))
    for server in setup.servers:
        if server.base_url is None:
            raise NoBaseUrl("base_url is missing in one of the servers")
        _endpoint_named(context, server.base_url)
    model = await _model(context) or setup.model_name
    return json_response({"status": "ok", "servers": len(context.upstream.endpoints), "model_name": model})


async def list_servers(request: web.Request) -> web.Response:
    """`GET /servers`."""
    context = request.app[CONTEXT]
    healthy = await healthy_engines(context)
    servers = [
        {
            "index": index,
            "base_url": endpoint.settings.url,
            "healthy": healthy[endpoint.label],
            "model_name": await _served_model(context, endpoint),
            "server_type": endpoint.kind,
        }
        for index, endpoint in enumerate(context.upstream.endpoints)
    ]
    return json_response({"servers": servers})


async def create_session(request: web.Request) -> web.Response:
    """`POST /sessions/create`: create a rollout. With a `base_url`, its id is one that every replica routes to that engine."""
    context = request.app[CONTEXT]
    text = await read_bytes(request)
    body = await off_loop(len(text), LARGE_BYTES, lambda: read_as(CreateSession, read_body(text or b"{}")))
    engine = None if body.base_url is None else _endpoint_named(context, body.base_url)
    name = session_id(context.clock.entropy(16))
    while engine is not None and preferred(context.upstream.endpoints, name).settings.url != engine.settings.url:
        name = session_id(context.clock.entropy(16))
    model = await _served_model(context, choose(context.upstream.endpoints, name))
    terms = {**body.model_dump(), "model_name": model}
    stored = await context.store.open(name, write_fields({"metadata": {TERMS: terms}}), now_ms=context.clock.now_ms())
    payload = {
        "uuid": name,
        "model_name": model,
        "tool_parser": body.tool_parser,
        "base_url": body.base_url,
        "created_at": stored.created_ms / 1000,
    }
    return json_response(payload)


async def list_sessions(request: web.Request) -> web.Response:
    """`GET /sessions`: all sessions, newest first."""
    context = request.app[CONTEXT]
    sessions = []
    async for name in context.store.names():
        found, _ = read_rollouts([await context.store.get(name)] if is_session_id(name) else [], context.metrics)
        sessions += [
            await _session(context, rollout, terms) for rollout in found if (terms := terms_from(rollout)) is not None
        ]
    return json_response({"sessions": sessions})


async def _session(context: Context, rollout: Rollout, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a session. `num_nodes` is null if its steps cannot be nodes: all others are listed."""
    try:
        count = len(await _nodes(context, rollout, terms))
    except (Conflict, NotFound):
        count = None
    return {
        "uuid": rollout.rollout_id,
        "model_name": terms.get("model_name"),
        "base_url": terms.get("base_url"),
        "created_at": rollout.created_ms / 1000,
        "last_accessed": rollout.touched_ms / 1000,
        "num_nodes": count,
    }


async def show_nodes(request: web.Request) -> web.Response:
    """`GET /{uuid}/nodes`. `full_text` is null unless a tokenizer is configured or the engine detokenizes."""
    context = request.app[CONTEXT]
    rollout = await _session_from(request)
    nodes = await _nodes(context, rollout, terms_from(rollout) or {})
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    texts = await _detokenized(context, endpoint, [node["tokens"] for node in nodes])
    return json_response({"nodes": [{**node, "full_text": text} for node, text in zip(nodes, texts, strict=True)]})


async def delete_session(request: web.Request) -> web.Response:
    """`DELETE /{uuid}`: delete the session and finish its rollout.

    With `atropos.keep_sessions: false` the rollout and its steps are deleted as well.
    """
    context, rollout = request.app[CONTEXT], await _session_from(request)
    if context.settings.atropos.keep_sessions:
        await _finish(context, rollout)
    else:
        await context.store.delete(rollout.rollout_id)
    return json_response({"status": "deleted", "uuid": rollout.rollout_id})


async def _finish(context: Context, rollout: Rollout) -> None:
    """Finish the rollout of a session and mark the session as deleted. An earlier status of the rollout is not changed."""
    if not rollout.is_finished:
        with suppress(Conflict):  # another request has finished it
            rollout = await context.finisher.finish(rollout, "completed")
    is_marked = False
    with suppress(NotFound):  # deleted meanwhile
        while not is_marked:
            fields = write_fields({"metadata": deleted_metadata(rollout)})
            expect = {"metadata": rollout.origin.fields.get("metadata")}
            is_marked, rollout = await update_rollout(context, rollout, fields, expect)


async def _count_sessions(context: Context) -> int | None:
    """Return the number of sessions, from their ids alone; None if the store fails or times out."""
    try:
        async with asyncio.timeout(_COUNT_TIMEOUT_S):
            return len([name async for name in context.store.names() if is_session_id(name)])
    except (TimeoutError, StorageError):
        return None


async def _nodes(context: Context, rollout: Rollout, terms: Mapping[str, Any]) -> list[dict[str, Any]]:
    read = await read_steps(context.store, rollout, whole=False)
    steps = [step for step in read if context.policies.exports(None, step.policy)]
    as_tree = bool(terms.get("track_tree"))
    try:
        return await aside(len(steps), lambda: nodes_from(facts_of(rollout), steps, as_tree=as_tree))
    except Inexpressible as error:
        raise Conflict(str(error)) from None


async def render(request: web.Request) -> web.Response:
    """`POST …/chat/completions/render`: the prompt of this call, as the engine renders it. No step is recorded."""
    rollout, _ = await _admitted(request)
    context = request.app[CONTEXT]
    body = await read_bytes(request)
    chat = await off_loop(len(body), LARGE_BYTES, lambda: read_session_chat(CHAT, read_body(body), context.translation))
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    call = chat.native(context.settings.models, endpoint.kind)
    await context.upstream.ensure_detected(endpoint)
    lookup = render_request(endpoint.engine, call, call["messages"])
    if lookup is None:
        raise NotRendered(f"{endpoint.settings.public_label} ({endpoint.kind}) does not support /tokenize for messages")
    try:
        ids = read_ids(await _fetch_json(context, endpoint, "POST", lookup.path, lookup.body))
    except EngineError as fault:
        raise NotRendered(fault.public) from fault
    if ids is None:
        raise NotRendered("The engine's response to POST /tokenize has no token ids")
    (text,) = await _detokenized(context, endpoint, [ids])
    return json_response({"prompt_text": text, "token_ids": ids.tolist(), "num_tokens": len(ids)})


async def call_chat(request: web.Request) -> web.StreamResponse:
    """`POST …/chat/completions`: a recorded call."""
    return await handle_call(await _model_request(request, CHAT), _CHAT_ROUTE)


async def call_completions(request: web.Request) -> web.StreamResponse:
    """`POST …/completions`: a recorded call."""
    endpoint = "/v1/completions"
    return await handle_call(await _model_request(request, endpoint), request.app[CALLS][endpoint])


async def list_models(request: web.Request) -> web.StreamResponse:
    """`GET …/models`: the same as without a session."""
    return await show_models(await _model_request(request, "/v1/models"))


async def _model_request(request: web.Request, endpoint: str) -> ModelRequest:
    rollout, caller = await _admitted(request)
    return ModelRequest(request, request.app[CONTEXT], endpoint, rollout.rollout_id, caller)


async def _admitted(request: web.Request) -> tuple[Rollout, Caller]:
    """Return the session and the caller, if the caller has access to it. Raises Unauthorized, Forbidden or NotFound."""
    caller = await identify(request, request.app[CONTEXT])
    check_minted(caller.minted, request.match_info["uuid"])
    return await _session_from(request), caller


async def _session_from(request: web.Request) -> Rollout:
    """Return the session that the path names. Raises NotFound."""
    name = request.match_info["uuid"]
    stored = await request.app[CONTEXT].store.get(name) if is_session_id(name) else None
    rollout = None if stored is None else read_rollout(stored)
    if rollout is None or terms_from(rollout) is None:
        raise NotFound(f"Session {name} not found")
    return rollout


def _endpoint_named(context: Context, url: str) -> Endpoint:
    """Return the configured engine with this base URL, with or without `/v1` and slashes. Raises NotFound, which lists all."""
    known = {endpoint.settings.url: endpoint for endpoint in context.upstream.endpoints}
    try:
        return known[base_url(url)]
    except (KeyError, ValueError):
        raise NotFound(
            f"No server with base_url {url!r}. Available: {list(known)}. Only configured engines "
            "(engines.endpoints) can be used."
        ) from None


async def _model(context: Context) -> str | None:
    """Return the model of the first engine: Atropos' proxy has one model."""
    return await _served_model(context, context.upstream.endpoints[0]) if context.upstream.endpoints else None


async def _served_model(context: Context, endpoint: Endpoint) -> str | None:
    """Return the model that an engine serves; None if it is unknown."""
    try:
        async with asyncio.timeout(_MODEL_TIMEOUT_S):
            listed = await _fetch_json(context, endpoint, "GET", "/v1/models", None)
        return str(listed["data"][0]["id"])
    except (EngineError, NotRendered, TimeoutError, KeyError, IndexError, TypeError):
        return None


async def _detokenized(context: Context, endpoint: Endpoint, id_lists: Sequence[Sequence[int]]) -> list[str | None]:
    """Return the texts of lists of ids, special tokens included, from the endpoint's tokenizer or else from the engine.

    A text is None if neither is available.
    """
    tokenizer = await context.tokenizers.get(endpoint.label)
    if tokenizer is not None:
        return await asyncio.to_thread(lambda: [tokenizer.decode(ids) for ids in id_lists])
    await context.upstream.ensure_detected(endpoint)
    return list(await asyncio.gather(*(detokenize_at_engine(context.upstream, endpoint, ids) for ids in id_lists)))


async def _fetch_json(context: Context, endpoint: Endpoint, method: str, path: str, body: Any) -> Any:
    """Send a request to an engine and return the JSON of its response.

    Raises EngineError, or NotRendered for a status other than 200.
    """
    headers = () if body is None else (("Content-Type", "application/json"),)
    text = None if body is None else orjson.dumps(body)
    with closing(await context.upstream.send(endpoint, method, path, headers=headers, body=text)) as response:
        if response.status == 200:
            return await json_of(response)
        error = (await body_of(response))[:300].decode("utf-8", "replace")
    raise NotRendered(f"{endpoint.settings.name or 'the engine'} returned status {response.status}: {error}")


def _with_errors(handler: Handler) -> Handler:
    """Return the handler with errors in the format of Atropos' proxy."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ProxyError, StorageError) as failure:
            if request.get(RESPONSE_STARTED):
                raise  # a part of the response is already sent
            error = (
                failure if isinstance(failure, ProxyError) else StoreUnavailable(f"The store is unavailable: {failure}")
            )
        if isinstance(error, SchemaFault):
            return json_response({"detail": error.detail}, status=422)
        error = visible_error(request, error)
        body = error_body(error.status, error.message)
        return web.Response(status=error.status, body=body, headers=error_headers(request, error))

    return handle


def _route(method: str, path: str, handler: Handler, summary: str) -> Route:
    statuses = (200, 400, 401, 403, 404, 422, 500, 503)
    return route(method, path, _with_errors(handler), f"{summary} Only with atropos.enabled.", *statuses)


_DELETE: Final = "Delete a session; its rollout is finished and kept (`atropos.keep_sessions`)."
SESSION_ROUTES: Final = (
    _route("post", "/setup", set_up, "Check that the named engines are configured."),
    _route("get", "/servers", list_servers, "List the engines, in the format of Atropos' proxy."),
    _route("post", "/sessions/create", create_session, "Open a session, which is a rollout."),
    _route("get", "/sessions", list_sessions, "List all sessions."),
    _route("get", "/{uuid}/nodes", show_nodes, "List the nodes of a session."),
    _route("delete", "/{uuid}", delete_session, _DELETE),
)
# Of the model API: agents call them.
SESSION_CALL_ROUTES: Final = (
    _route("post", f"{SESSION_API}/chat/completions", call_chat, "Make a recorded chat call in a session."),
    _route("post", f"{SESSION_API}/chat/completions/render", render, "Render the prompt of a chat call."),
    _route("post", f"{SESSION_API}/completions", call_completions, "Make a recorded completions call in a session."),
    _route("get", f"{SESSION_API}/models", list_models, "List the engine's models."),
)
# Served instead of the other `/health`, with the fields of Atropos' proxy.
SESSION_HEALTH: Final = route("get", "/health", _with_errors(show_health), "Check that the process is alive.")
