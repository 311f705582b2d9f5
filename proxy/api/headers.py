"""The headers of responses to clients."""

from functools import partial
from typing import Final

from proxy.upstream.headers import ROLLOUT_HEADER, STEP_HEADER
from proxy.upstream.http_client import HOP_BY_HOP, end_to_end

# What TokenTape sets itself; and what is about the engine's own address and not about its response: addresses behind
# TokenTape, credentials for them, and the permissions that the engine gives to web pages, also those of other origins.
_NOT_SHOWN: Final = HOP_BY_HOP | {
    "content-length", "content-encoding", "date", ROLLOUT_HEADER.lower(), STEP_HEADER.lower(),
    "location", "content-location", "refresh", "link", "alt-svc", "via", "x-served-by", "x-backend-server",
    "x-accel-redirect", "x-sendfile",
    "set-cookie", "set-cookie2", "www-authenticate", "authentication-info",
    "timing-allow-origin", "strict-transport-security", "clear-site-data", "service-worker-allowed", "origin-agent-cluster",
    "report-to", "reporting-endpoints", "nel", "sourcemap", "x-sourcemap",
}  # fmt: skip
_NOT_SHOWN_PREFIXES: Final = ("access-control-", "content-security-policy", "cross-origin-")


# Returns the headers of an engine's response that its client gets.
downstream: Final = partial(end_to_end, dropped=_NOT_SHOWN, prefixes=_NOT_SHOWN_PREFIXES)
