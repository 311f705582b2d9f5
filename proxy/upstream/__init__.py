"""Connections to the engine endpoints: detection, health checks, routing, queues and requests.

endpoint          one engine, its queue of calls that is fair between rollouts, and the order in which calls try the endpoints
detection         detects what an engine is
health            health checks, and for how long an endpoint is ejected
lora              loads and unloads LoRA adapters
client            requests to endpoints, and their errors
http_client       HTTP/1.1 on aiohttp's connections

aiohttp's exceptions are translated here: callers see only exceptions of `proxy.errors`. Nothing in this package interprets a
body.
"""

from proxy.upstream.client import Upstream
from proxy.upstream.endpoint import Endpoint, choose, least_loaded, preferred, ranked
from proxy.upstream.health import ejected_for

__all__ = ["Endpoint", "Upstream", "choose", "ejected_for", "least_loaded", "preferred", "ranked"]
