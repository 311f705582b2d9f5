"""Liveness, readiness and metrics, for operators and load balancers."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from proxy.api.context import CONTEXT, Context
from proxy.api.requests import json_response
from proxy.trajectory.step import DEFAULT_POLICY
from proxy.upstream.endpoint import Endpoint
from storage.errors import StorageError
from storage.types import QueueCounts

T = TypeVar("T")

_STORE_TIMEOUT_S = 1.0
_READY_TIMEOUT_S = 2
_VERSION: Final = version("tokentape")

STORE_GAUGES: Final = {
    "memory_bytes": "Memory used by the servers of the store.",
    "memory_limit_bytes": "Memory limit of the servers of the store (maxmemory); 0 if one of them has no limit.",
    "memory_share": "Share of its memory limit that the fullest server of the store uses; 0 if none has a limit.",
    "aof_ok": "1 if every server of the store keeps an append-only file and its last write succeeded, else 0.",
}

_QUEUE_GAUGES: Final[Mapping[str, tuple[str, Callable[[QueueCounts], float]]]] = {
    "complete_groups": ("Complete groups that no consumer has claimed.", lambda counts: counts.available),
    "claimed_groups": (
        "Groups that consumers have claimed and not acknowledged.", lambda counts: counts.claimed,
    ),
    "oldest_complete_group_age_seconds": (
        "Time since the oldest unclaimed group is complete; 0 if there is none.", lambda counts: counts.oldest_age_ms / 1000,
    ),
}  # fmt: skip


def make_info_metrics(
    registry: CollectorRegistry,
    endpoints: Collection[Endpoint],
    facts: Mapping[str, str],
    queues: Mapping[str, QueueCounts],
) -> list[Gauge]:
    """Create and register the gauges, except for facts that the store does not report. `queues`: the counts by policy."""
    gauges = []

    def add(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> None:
        gauges.append(gauge := Gauge(f"tokentape_{name}", text, labels, registry=registry))
        for series, value in values.items():
            (gauge.labels(*series) if series else gauge).set(value)

    add("build_info", "Always 1; the label is the version of TokenTape.", ("version",), {(_VERSION,): 1})
    text = "Always 1; the labels are the detected kind and version of an endpoint."
    detected = {(endpoint.label, endpoint.kind, endpoint.version or "unknown"): 1 for endpoint in endpoints}
    add("engine_info", text, ("engine", "kind", "version"), detected)
    text = "Always 1; the labels are the version and the durability of the store."
    known = {(facts["version"], facts["durability"]): 1} if "version" in facts else {}
    add("store_info", text, ("version", "durability"), known)
    for fact, text in STORE_GAUGES.items():
        if fact in facts:
            add(f"store_{fact}", text, (), {(): float(facts[fact])})
    for name, (text, value) in _QUEUE_GAUGES.items():
        add(name, text, ("policy",), {(policy,): value(counts) for policy, counts in queues.items()})
    return gauges


async def _facts(context: Context) -> tuple[dict[str, str], dict[str, QueueCounts]]:
    """Return the facts about the store and the queues of its policies; nothing of what is unreachable or slow."""
    queue, policies = context.store.queue, list(dict.fromkeys([*context.policies.trained, DEFAULT_POLICY]))
    facts = await _in_time(context.store.info())
    counts = await asyncio.gather(*(_in_time(queue.counts(policy)) for policy in policies))
    return facts or {}, {policy: it for policy, it in zip(policies, counts, strict=True) if it is not None}


async def _in_time(reply: Awaitable[T]) -> T | None:
    """Return the reply of the store; None if it is unreachable or slow."""
    try:
        async with asyncio.timeout(_STORE_TIMEOUT_S):
            return await reply
    except (TimeoutError, StorageError):
        return None


async def show_health(_request: web.Request) -> web.Response:
    """`GET /health`: the process is alive."""
    return json_response({"status": "ok"})


async def show_ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 if the store is reachable, otherwise 503 with the state of the store and of each engine.

    Of several servers one that responds is enough: calls of its rollouts succeed. `servers` has the state of each.

    With `ready_requires_engine`, an engine must pass a health check too; otherwise no engine can delay the response. A journal
    replaces an unreachable store (store.on_failure: spool): `spooled` is the number of steps in it. It returns 503 from the
    first SIGTERM on: for `shutdown_delay_s`, or with a separate port of the control API until the process ends.
    `without_token_ids` names the engines that return no token ids: their calls are recorded as text only.
    """
    context = request.app[CONTEXT]
    if context.stopping.is_set():
        return json_response(
            {"status": "stopping", "in_flight": sum(live.calls for live in context.rollouts.busy)}, status=503
        )
    is_strict = context.settings.ready_requires_engine
    engines = {endpoint.label: not endpoint.health.is_ejected for endpoint in context.upstream.endpoints}
    if is_strict:
        servers, engines = await asyncio.gather(_servers(context), healthy_engines(context))
    else:
        servers = await _servers(context)
    spooled = context.recorder.journaled
    is_ready = (None in servers.values() or spooled is not None) and (any(engines.values()) or not is_strict)
    store = "; ".join(filter(None, servers.values())) or "ok"
    state: dict[str, Any] = {"status": "ready" if is_ready else "not ready", "store": store, "engines": engines}
    if len(servers) > 1:
        state["servers"] = {server: reason or "ok" for server, reason in servers.items()}
    if spooled is not None:
        state["spooled"] = spooled
    if without := [endpoint.label for endpoint in context.upstream.endpoints if endpoint.returns_ids is False]:
        state["without_token_ids"] = without
    return json_response(state, status=200 if is_ready else 503, headers={} if is_ready else {"Retry-After": "1"})


async def show_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`: the metrics of all workers, in Prometheus' text format."""
    context = request.app[CONTEXT]
    counted, facts = await asyncio.gather(context.worker_metrics.exposition(), _facts(context))
    registry = CollectorRegistry()
    make_info_metrics(registry, context.upstream.endpoints, *facts)
    return web.Response(body=counted + generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _servers(context: Context) -> Mapping[str, str | None]:
    """Return why each server of the store is unreachable, by its address; None for those that respond."""
    known = context.recorder.store_health.unreachable
    try:
        servers = await context.store.ping(_READY_TIMEOUT_S)
    except StorageError as error:
        return known or {"": str(error)}
    return {server: known.get(server, reason) for server, reason in servers.items()}


async def healthy_engines(context: Context) -> dict[str, bool]:
    """Check each endpoint and return whether it is healthy, by name."""
    endpoints = context.upstream.endpoints
    found = await asyncio.gather(*map(context.upstream.health_checker.check, endpoints))
    return {endpoint.label: healthy for endpoint, healthy in zip(endpoints, found, strict=True)}
