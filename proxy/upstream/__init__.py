"""Connections to the engine endpoints: detection, health checks, routing, queues and requests.

endpoint          one engine: its settings and state
detection         detects what an engine is
health, ejection  health checks, and for how long an endpoint is ejected
routing           the order in which a call tries the endpoints
failover          the endpoints of one call, and when the next one is tried
queue             the limit of concurrent calls, fair between rollouts
lora              loads and unloads LoRA adapters
client            requests to endpoints, and their errors
failure_text      sentences for failed connections
http_client       HTTP/1.1 on aiohttp's connections; http_response and decoding read what engines return

aiohttp's exceptions are translated here: callers see only those of `proxy.errors`. Nothing in this package interprets a
body.
"""

from proxy.upstream.client import EngineResponse, Upstream
from proxy.upstream.endpoint import Endpoint
from proxy.upstream.health import ejected_for
from proxy.upstream.routing import choose, least_loaded, preferred, ranked

__all__ = ["Endpoint", "EngineResponse", "Upstream", "choose", "ejected_for", "least_loaded", "preferred", "ranked"]
