"""The routes of `/engines`: the state of the endpoints, and their replacement. API keys of engines are never shown."""

import asyncio
from typing import Any

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import PutEngines
from proxy.api.health import healthy_engines
from proxy.api.http import json_response
from proxy.api.requests import body_from
from proxy.config.sections import RecordSettings
from proxy.errors import Forbidden
from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.engines.quirks import QUIRKS, choose_framing
from proxy.upstream import Endpoint, ejected_for

_DIALECTS: tuple[DialectName, ...] = ("chat", "completions")  # the dialects whose streams may be synthetic


async def show_engines(request: web.Request) -> web.Response:
    """`GET /engines`: endpoints with health, calls in flight, versions and known limitations."""
    return await _engines_response(request.app[CONTEXT])


async def put_engines(request: web.Request) -> web.Response:
    """`PUT /engines`: replace the endpoints, in this process at once and in all that share the store within a second.

    Calls in flight end at their endpoints. A configured control key is required: a caller who sets endpoints can read all
    calls, and can make the proxy send requests to any reachable address.
    """
    context = request.app[CONTEXT]
    if not context.control_keys:
        raise Forbidden("Changing endpoints requires a control key, and none is configured; set control.api_keys.")
    await context.registry.put((await body_from(request, PutEngines)).endpoints)
    return await _engines_response(context)


async def _engines_response(context: Context) -> web.Response:
    healthy = await healthy_engines(context)
    await context.upstream.detect_all()
    listing = [
        context.upstream.list_models(endpoint)
        for endpoint in context.upstream.endpoints
        if healthy.get(endpoint.label) and not endpoint.settings.models
    ]
    await asyncio.gather(*listing)  # adapters are loaded at run time
    record, now = context.settings.record, context.clock.now()
    shown = [_engine(endpoint, healthy, record, now) for endpoint in context.upstream.endpoints]
    return json_response({"engines": shown, "configured": not context.registry.is_overridden})


def _engine(endpoint: Endpoint, healthy: dict[str, bool], record: RecordSettings, now: float) -> dict[str, Any]:
    traits = endpoint.known()
    streaming = endpoint.settings.streaming or record.streaming
    options = CallOptions(streaming=streaming, logprobs=record.logprobs, traits=traits)
    ejected_s = ejected_for(endpoint)
    return {
        "name": endpoint.label,
        "url": endpoint.settings.url,
        "kind": endpoint.kind,
        "version": endpoint.version,
        "token_ids": endpoint.returns_ids,
        "models": endpoint.settings.models or sorted(endpoint.models.names or ()),
        "logprobs_mode": endpoint.settings.logprobs_mode or endpoint.engine.logprobs_mode,
        "sampling_defaults": traits.sampling_defaults,
        "parser": traits.has_parser,
        "streams": {name: choose_framing(name, {"stream": True}, options) for name in _DIALECTS},
        "loses": [quirk.what for quirk in QUIRKS if quirk.engine == endpoint.engine.kind],
        "healthy": healthy.get(endpoint.label, False),  # False for one that was added during the check
        "ejected_until": None if ejected_s is None else now + ejected_s,
        "max_in_flight": endpoint.settings.max_in_flight,
        "in_flight": endpoint.queue.in_flight,
        "queued": endpoint.queue.waiting,
        "faults": endpoint.faults,
        "last_fault": endpoint.last_fault,
    }
