"""The system: alive, ready, its metrics.

Holds the routes that operators and load balancers call.
"""

import asyncio
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.control.told import told_now
from proxy.parts import PARTS, Parts
from storage.errors import StorageError

_READY_WITHIN_S = 2


async def show_health(_request: web.Request) -> web.Response:
    """`GET /health`: the process answers."""
    return _json({"status": "ok"})


async def show_ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 if the store answers and at least one engine is healthy, else 503 saying which is not.

    A journal stands in for a store that is away (store.on_failure: spool): `spooled` is how many steps wait in it.
    From the first SIGTERM it is 503: for `shutdown_delay_s`, and with a separate port of the control API until the shutdown
    is complete.
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


async def show_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`: Prometheus, of all workers together."""
    parts = request.app[PARTS]
    counted, told = await asyncio.gather(parts.totals.exposition(), told_now(parts))
    return web.Response(body=counted + told, headers={"Content-Type": CONTENT_TYPE_LATEST})


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
    found = await asyncio.gather(*map(parts.upstream.watch.check, endpoints))
    return {endpoint.settings.label: healthy for endpoint, healthy in zip(endpoints, found, strict=True)}


def _json(value: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json", headers=headers)
