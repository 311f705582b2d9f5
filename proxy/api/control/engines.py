"""The engines: how they stand, and which ones there are.

Holds the routes of `/engines`. No key of an engine is shown, and only who has a control key says where calls are sent.
"""

from typing import Any

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import PutEngines, body_from
from proxy.api.health import healthy_engines
from proxy.config.sections import RecordSettings
from proxy.errors import Forbidden
from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.quirks import QUIRKS, CallTraits, choose_framing
from proxy.upstream import Endpoint, ejected_for

_DIALECTS: tuple[DialectName, ...] = ("chat", "completions")  # those whose streams may be replayed


async def show_engines(request: web.Request) -> web.Response:
    """`GET /engines`: endpoints, health, calls in flight, versions, and what each is known to lose."""
    return await _shown(request.app[CONTEXT])


async def put_engines(request: web.Request) -> web.Response:
    """`PUT /engines`: from the answer on calls go to these, and within a second at every process that shares the store.

    Calls in flight end where they are. It is refused where no control key is configured: whoever may say where calls are
    sent can read them, and have any address within reach called.
    """
    context = request.app[CONTEXT]
    if not context.control_keys:
        raise Forbidden("endpoints are changed with a control key only, and none is configured: set control.api_keys")
    await context.registry.put((await body_from(request, PutEngines)).endpoints)
    return await _shown(context)


async def _shown(context: Context) -> web.Response:
    healthy = await healthy_engines(context)
    await context.upstream.learn()
    record, now = context.settings.record, context.clock.now()
    shown = [_engine(endpoint, healthy, record, now) for endpoint in context.upstream.endpoints]
    told = {"engines": shown, "configured": not context.registry.is_put}
    return web.Response(body=orjson.dumps(told), content_type="application/json")


def _engine(endpoint: Endpoint, healthy: dict[str, bool], record: RecordSettings, now: float) -> dict[str, Any]:
    traits = endpoint.known
    ejected_s = ejected_for(endpoint)
    return {
        "name": endpoint.settings.label,
        "url": endpoint.settings.url,
        "kind": endpoint.kind,
        "version": endpoint.version,
        "logprobs_mode": endpoint.settings.logprobs_mode or endpoint.engine.logprobs_mode,
        "sampling_defaults": traits.sampling_defaults,
        "parser": traits.has_parser,
        "streams": {
            name: choose_framing(
                endpoint.settings.streaming or record.streaming,
                endpoint.engine.kind,
                CallTraits(name, {"stream": True}, traits, wants_logprobs=record.logprobs != "off"),
                can_replay=True,
            )
            for name in _DIALECTS
        },
        "loses": [loss.what for loss in QUIRKS if loss.engine == endpoint.engine.kind],
        "healthy": healthy.get(endpoint.settings.label, False),  # added while the others were asked: not asked yet
        "ejected_until": None if ejected_s is None else now + ejected_s,
        "max_in_flight": endpoint.settings.max_in_flight,
        "in_flight": endpoint.turns.in_flight,
        "queued": endpoint.turns.waiting,
        "faults": endpoint.faults,
        "last_fault": endpoint.last_fault,
    }
