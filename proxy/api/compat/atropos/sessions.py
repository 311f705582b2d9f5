"""The routes of Atropos' proxy (296a0bc) that create, list and delete sessions.

A session is a rollout in the store, so every replica serves it. Engines are those of the configuration; no request adds one.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from proxy.api.body import read_body, read_bytes
from proxy.api.compat.atropos.engines import detokenize, endpoint_named, served_model
from proxy.api.compat.atropos.schemas import CreateSession, SchemaFault, Setup, read_as
from proxy.api.compat.atropos.session import (
    TERMS,
    deleted_metadata,
    error_body,
    is_session_id,
    nodes_from,
    session_id,
    terms_from,
)
from proxy.api.context import CONTEXT, Context
from proxy.api.failures import error_headers, visible_error
from proxy.api.health import healthy_engines
from proxy.api.http import RESPONSE_STARTED, json_response
from proxy.api.query import Handler, Route, route
from proxy.errors import Conflict, NotFound, ProxyError, StoreUnavailable
from proxy.export import Inexpressible
from proxy.rollouts.rollout import Rollout, read_rollout, read_rollouts, write_fields
from proxy.rollouts.steps import aside, facts_of, read_steps
from proxy.upstream import Endpoint, choose, preferred
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from storage.errors import FieldsChanged, StorageError

_COUNT_TIMEOUT_S: Final = 2


def with_atropos_errors(route: Handler) -> Handler:
    """Return the route with errors in the format of Atropos' proxy."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await route(request)
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


async def session_from(request: web.Request) -> Rollout:
    """Return the session that the path names. Raises NotFound."""
    name = request.match_info["uuid"]
    stored = await request.app[CONTEXT].store.get(name) if is_session_id(name) else None
    rollout = None if stored is None else read_rollout(stored)
    if rollout is None or terms_from(rollout) is None:
        raise NotFound(f"Session {name} not found")
    return rollout


async def show_health(request: web.Request) -> web.Response:
    """`GET /health`: the response of TokenTape with the fields of Atropos' proxy."""
    context = request.app[CONTEXT]
    engines, model, sessions = await asyncio.gather(healthy_engines(context), _model(context), _count_sessions(context))
    payload = {
        "status": "ok",
        "model": model,
        "sessions": sessions,
        "servers": len(engines),
        "healthy_servers": sum(engines.values()),
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
        endpoint_named(context, server.base_url)
    payload = {
        "status": "ok",
        "servers": len(context.upstream.endpoints),
        "model_name": await _model(context) or setup.model_name,
    }
    return json_response(payload)


async def list_servers(request: web.Request) -> web.Response:
    """`GET /servers`."""
    context = request.app[CONTEXT]
    healthy = await healthy_engines(context)
    return json_response(
        {"servers": [await _server(context, index, healthy) for index in range(len(context.upstream.endpoints))]}
    )


async def create_session(request: web.Request) -> web.Response:
    """`POST /sessions/create`: create a rollout. With a `base_url`, its id is one that every replica routes to that engine."""
    context = request.app[CONTEXT]
    text = await read_bytes(request)
    body = await off_loop(len(text), LARGE_BYTES, lambda: read_as(CreateSession, read_body(text or b"{}")))
    engine = None if body.base_url is None else endpoint_named(context, body.base_url)
    name = session_id(context.clock.entropy(16))
    while engine is not None and preferred(context.upstream.endpoints, name).settings.url != engine.settings.url:
        name = session_id(context.clock.entropy(16))
    model = await served_model(context, choose(context.upstream.endpoints, name))
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
    rollout = await session_from(request)
    nodes = await _nodes(context, rollout, terms_from(rollout) or {})
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    texts = await detokenize(context, endpoint, [node["tokens"] for node in nodes])
    return json_response({"nodes": [{**node, "full_text": text} for node, text in zip(nodes, texts, strict=True)]})


async def delete_session(request: web.Request) -> web.Response:
    """`DELETE /{uuid}`: delete the session and finish its rollout.

    With `atropos.keep_sessions: false` the rollout and its steps are deleted as well.
    """
    context, rollout = request.app[CONTEXT], await session_from(request)
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
    while True:
        fields = write_fields({"metadata": deleted_metadata(rollout)})
        expect = {"metadata": rollout.origin.fields.get("metadata")}
        try:
            await context.store.update_if(rollout.rollout_id, fields, expect=expect, now_ms=context.clock.now_ms())
        except FieldsChanged as changed:
            rollout = read_rollout(changed.rollout)  # changed by another request: try again
        else:
            return


async def _count_sessions(context: Context) -> int | None:
    """Return the number of sessions, from their ids alone; None if the store fails or times out."""

    async def count() -> int:
        return len([name async for name in context.store.names() if is_session_id(name)])

    try:
        return await asyncio.wait_for(count(), _COUNT_TIMEOUT_S)
    except (TimeoutError, StorageError):
        return None


class NoBaseUrl(ProxyError):
    """A server without a URL; Atropos' proxy responds with 500."""


async def _nodes(context: Context, rollout: Rollout, terms: Mapping[str, Any]) -> list[dict[str, Any]]:
    read = await read_steps(context.store, rollout, whole=False)
    steps = [step for step in read if context.policies.exports(None, step.policy)]
    as_tree = bool(terms.get("track_tree"))
    try:
        return await aside(len(steps), lambda: nodes_from(facts_of(rollout), steps, as_tree=as_tree))
    except Inexpressible as error:
        raise Conflict(str(error)) from None


async def _model(context: Context) -> str | None:
    """Return the model of the first engine: Atropos' proxy has one model."""
    return await served_model(context, context.upstream.endpoints[0]) if context.upstream.endpoints else None


async def _server(context: Context, index: int, healthy: Mapping[str, bool]) -> dict[str, Any]:
    endpoint: Endpoint = context.upstream.endpoints[index]
    return {
        "index": index,
        "base_url": endpoint.settings.url,
        "healthy": healthy[endpoint.label],
        "model_name": await served_model(context, endpoint),
        "server_type": endpoint.kind,
    }


def session_route(method: str, path: str, handler: Handler, summary: str) -> Route:
    """Return a route of Atropos' proxy."""
    statuses = (200, 400, 401, 403, 404, 422, 500, 503)
    return route(method, path, with_atropos_errors(handler), f"{summary} Only with atropos.enabled.", *statuses)


_DELETE: Final = "Delete a session; its rollout is finished and kept (`atropos.keep_sessions`)."
SESSION_ROUTES: Final = (
    session_route("post", "/setup", set_up, "Check that the named engines are configured."),
    session_route("get", "/servers", list_servers, "List the engines, in the format of Atropos' proxy."),
    session_route("post", "/sessions/create", create_session, "Open a session, which is a rollout."),
    session_route("get", "/sessions", list_sessions, "List all sessions."),
    session_route("get", "/{uuid}/nodes", show_nodes, "List the nodes of a session."),
    session_route("delete", "/{uuid}", delete_session, _DELETE),
)
# Served instead of the other `/health`, with the fields of Atropos' proxy.
SESSION_HEALTH: Final = route("get", "/health", with_atropos_errors(show_health), "Check that the process is alive.")
