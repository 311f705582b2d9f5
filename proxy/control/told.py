"""The gauges of `GET /metrics` that describe the proxy, its engines and its store.

They are created anew for each scrape and are the same in every worker, so they are not summed. The gauges of a store that is
unreachable or slow are left out, so that the scrape does not time out; `tokentape_store_up` shows an unreachable store.
"""

import asyncio
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from proxy.parts import Parts
from proxy.upstream import Endpoint
from storage.errors import StorageError

_STORE_TIMEOUT_S = 1.0
_VERSION: Final = version("tokentape")

FACTS: Final = {
    "memory_bytes": "Memory used by the servers of the store.",
    "memory_limit_bytes": "Memory limit of the servers of the store (maxmemory); 0 if one of them has no limit.",
    "aof_ok": "1 if every server of the store keeps an append-only file and its last write succeeded, else 0.",
}


async def told_now(parts: Parts) -> bytes:
    """Return the gauges in Prometheus' text format."""
    registry = CollectorRegistry()
    make_told(registry, parts.upstream.endpoints, await _facts(parts))
    return generate_latest(registry)


def make_told(registry: CollectorRegistry, endpoints: Collection[Endpoint], facts: Mapping[str, str]) -> list[Gauge]:
    """Create the gauges and register them. Facts that the store does not report are left out."""
    build = Gauge(
        "tokentape_build_info", "Always 1; the label is the version of TokenTape.", ("version",), registry=registry
    )
    build.labels(_VERSION).set(1)
    text = "Always 1; the labels are the detected kind and version of an endpoint."
    engines = Gauge("tokentape_engine_info", text, ("engine", "kind", "version"), registry=registry)
    for endpoint in endpoints:
        engines.labels(endpoint.settings.label, endpoint.kind, endpoint.version or "unknown").set(1)
    text = "Always 1; the labels are the version and the durability of the store."
    store_is = Gauge("tokentape_store_info", text, ("version", "durability"), registry=registry)
    if "version" in facts:
        store_is.labels(facts["version"], facts["durability"]).set(1)
    store = {fact: Gauge(f"tokentape_store_{fact}", FACTS[fact], registry=registry) for fact in FACTS if fact in facts}
    for fact, gauge in store.items():
        gauge.set(float(facts[fact]))
    return [build, engines, store_is, *store.values()]


async def _facts(parts: Parts) -> dict[str, str]:
    """Return the facts that the store reports; nothing if it is unreachable or slow."""
    if parts.recorder.standing.away is not None:
        return {}
    try:
        return await asyncio.wait_for(parts.store.info(), _STORE_TIMEOUT_S)
    except (TimeoutError, StorageError):
        return {}
