"""The headers of responses to clients."""

from collections.abc import Mapping
from typing import Final

from proxy.upstream.headers import ROLLOUT_HEADER, STEP_HEADER
from proxy.upstream.http_client import end_to_end

# What TokenTape sets itself; and what is about the engine's own address and not about its response: addresses behind
# TokenTape, credentials for them, and the permissions that the engine gives to web pages, also those of other origins.
_NOT_SHOWN: Final = frozenset({
    "content-length", "content-encoding", "date", ROLLOUT_HEADER.lower(), STEP_HEADER.lower(),
    "location", "content-location", "refresh", "link", "alt-svc", "via", "x-served-by", "x-backend-server",
    "x-accel-redirect", "x-sendfile",
    "set-cookie", "set-cookie2", "www-authenticate", "authentication-info",
    "timing-allow-origin", "strict-transport-security", "clear-site-data", "service-worker-allowed", "origin-agent-cluster",
    "report-to", "reporting-endpoints", "nel", "sourcemap", "x-sourcemap",
})  # fmt: skip
_NOT_SHOWN_PREFIXES: Final = ("access-control-", "content-security-policy", "cross-origin-")


def downstream(
    headers: Mapping[str, str], *, rollout_id: str | None = None, step_id: str | None = None
) -> list[tuple[str, str]]:
    """Return the engine's headers as they are sent to the client, with the ids of the rollout and the step."""
    shown = end_to_end(headers.items(), _NOT_SHOWN, _NOT_SHOWN_PREFIXES)
    if rollout_id is not None:
        shown.append((ROLLOUT_HEADER, rollout_id))
    if step_id is not None:
        shown.append((STEP_HEADER, step_id))
    return shown
