"""The engines, reachable: where they are, how they stand, which one a call goes to, and the sending of it.

endpoint  one engine: its settings, and what is known of it
health    when an endpoint is passed over, and for how long (pure)
choosing  which endpoint a call is tried at, in which order (pure)
meeting   what an engine is, found out
watching  the checks of endpoints, and the count of their faults
turns     how many calls it has at once, and who waits for whom
sending   one aiohttp session for all of them

aiohttp's exceptions stop here: past this package only ours are seen. Nothing in it understands a body.
"""

from proxy.upstream.client import EngineResponse, Upstream
from proxy.upstream.endpoint import Endpoint
from proxy.upstream.health import ejected_for
from proxy.upstream.routing import choose, least_loaded, own, ranked

__all__ = ["Endpoint", "EngineResponse", "Upstream", "choose", "ejected_for", "least_loaded", "own", "ranked"]
