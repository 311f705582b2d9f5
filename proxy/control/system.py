"""The system: alive, ready, its engines, its metrics.

Holds the routes that operators and load balancers call.
"""

import asyncio
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.dialects.base import DialectName
from proxy.engines.losses import LOSSES, Circumstances, choose_framing
from proxy.parts import PARTS, Parts
from proxy.sections import RecordSettings
from proxy.upstream import Endpoint
from storage.store import StorageError

_READY_WITHIN_S = 2
_DIALECTS: tuple[DialectName, ...] = ("chat", "completions")  # those whose streams may be replayed


async def show_health(_request: web.Request) -> web.Response:
    """`GET /health`: the process answers."""
    return _json({"status": "ok"})


async def show_ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 if the store answers and at least one engine is healthy, else 503 saying which is not.

    A journal stands in for a store that is away (store.on_failure: spool): `spooled` is how many steps wait in it.
    From the first signal to stop it is 503, for as long as the control face has a port of its own to say so.
    """
    parts = request.app[PARTS]
    if parts.stopping.is_set():
        return _json({"status": "stopping", "in_flight": parts.in_flight.total()}, status=503)
    store, engines = await asyncio.gather(_store(parts), healthy_engines(parts))
    spooled = parts.recorder.spooled
    is_ready = (store == "ok" or spooled is not None) and any(engines.values())
    told: dict[str, Any] = {"status": "ready" if is_ready else "not ready", "store": store, "engines": engines}
    if spooled is not None:
        told["spooled"] = spooled
    return _json(told, status=200 if is_ready else 503, headers={} if is_ready else {"Retry-After": "1"})


async def show_engines(request: web.Request) -> web.Response:
    """`GET /engines`: endpoints, health, calls in flight, versions, and what each is known to lose."""
    parts = request.app[PARTS]
    healthy = await healthy_engines(parts)
    await parts.upstream.learn()
    record = parts.settings.record
    return _json({"engines": [_engine(endpoint, healthy, record) for endpoint in parts.upstream.endpoints]})


async def show_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`: Prometheus."""
    return web.Response(
        body=generate_latest(request.app[PARTS].registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


async def _store(parts: Parts) -> str:
    if parts.recorder.standing.away is not None:
        return parts.recorder.standing.away
    try:
        await asyncio.wait_for(parts.store.ping(), _READY_WITHIN_S)
    except TimeoutError:
        return f"no answer within {_READY_WITHIN_S} s"
    except StorageError as error:
        return str(error)
    return "ok"


async def healthy_engines(parts: Parts) -> dict[str, bool]:
    """Whether each endpoint is healthy, by name."""
    endpoints = parts.upstream.endpoints
    found = await asyncio.gather(*(_is_healthy(parts, endpoint) for endpoint in endpoints))
    return {endpoint.settings.label: healthy for endpoint, healthy in zip(endpoints, found, strict=True)}


async def _is_healthy(parts: Parts, endpoint: Endpoint) -> bool:
    try:
        return await asyncio.wait_for(parts.upstream.is_healthy(endpoint), _READY_WITHIN_S)
    except TimeoutError:
        return False


def _engine(endpoint: Endpoint, healthy: dict[str, bool], record: RecordSettings) -> dict[str, Any]:
    traits = endpoint.known
    return {
        "name": endpoint.settings.label,
        "url": endpoint.settings.url,
        "kind": endpoint.kind,
        "version": endpoint.version,
        "logprobs_mode": endpoint.settings.logprobs_mode or endpoint.engine.logprobs_mode,
        "parser": traits.has_parser,
        "streams": {
            name: choose_framing(
                endpoint.settings.streaming or record.streaming,
                endpoint.engine.kind,
                Circumstances(name, {"stream": True}, traits, wants_logprobs=record.logprobs != "off"),
                bears_replay=True,
            )
            for name in _DIALECTS
        },
        "loses": [loss.what for loss in LOSSES if loss.engine == endpoint.engine.kind],
        "healthy": healthy[endpoint.settings.label],
        "in_flight": endpoint.in_flight,
        "faults": endpoint.faults,
        "last_fault": endpoint.last_fault,
    }


def _json(value: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json", headers=headers)
