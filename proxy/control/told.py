"""What `GET /metrics` tells beside what was counted: which version this is, what engines and store are, how the store does.

Holds these gauges, made anew whenever somebody asks: they are the same whichever worker answers, so they are told once and
never added up. A store that is away, or slow to say, is left out: `tokentape_store_away` tells of it, and Prometheus is
answered in time.
"""

import asyncio
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from proxy.parts import Parts
from proxy.upstream import Endpoint
from storage.errors import StorageError

_STORE_WITHIN_S = 1.0
_VERSION: Final = version("tokentape")

FACTS: Final = {
    "memory_bytes": "Memory that the servers of the store have taken.",
    "memory_bound_bytes": "Memory that they may take (maxmemory); 0 if one has no bound.",
    "file_written": "1 if each of them keeps an append-only file and wrote it well last, else 0.",
}


async def told_now(parts: Parts) -> bytes:
    """As Prometheus reads it."""
    registry = CollectorRegistry()
    make_told(registry, parts.upstream.endpoints, await _facts(parts))
    return generate_latest(registry)


def make_told(registry: CollectorRegistry, endpoints: Collection[Endpoint], facts: Mapping[str, str]) -> list[Gauge]:
    """The gauges, registered. Facts that the store does not tell are left out."""
    build = Gauge("tokentape_build_info", "1; the label is the version of this proxy.", ("version",), registry=registry)
    build.labels(_VERSION).set(1)
    text = "1; the labels are what an endpoint was found to be."
    engines = Gauge("tokentape_engine_info", text, ("engine", "kind", "version"), registry=registry)
    for endpoint in endpoints:
        engines.labels(endpoint.settings.label, endpoint.kind, endpoint.version or "unknown").set(1)
    text = "1; the labels are what the store's servers are, and when a step counts as stored."
    store_is = Gauge("tokentape_store_info", text, ("version", "durability"), registry=registry)
    if "version" in facts:
        store_is.labels(facts["version"], facts["durability"]).set(1)
    store = {fact: Gauge(f"tokentape_store_{fact}", FACTS[fact], registry=registry) for fact in FACTS if fact in facts}
    for fact, gauge in store.items():
        gauge.set(float(facts[fact]))
    return [build, engines, store_is, *store.values()]


async def _facts(parts: Parts) -> dict[str, str]:
    """What the store says of itself; nothing where it does not in time."""
    if parts.recorder.standing.away is not None:
        return {}
    try:
        return await asyncio.wait_for(parts.store.facts(), _STORE_WITHIN_S)
    except (TimeoutError, StorageError):
        return {}
