"""TokenTape's own headers, and the headers that are forwarded in each direction.

Headers that describe the framing of a body are dropped.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from proxy.upstream.endpoint import Endpoint

ROLLOUT_HEADER: Final = "X-Rollout-Id"  # names the rollout, in requests and responses
GROUP_HEADER: Final = "X-Rollout-Group"
CONTINUATION_HEADER: Final = "X-Rollout-Continuation"  # the continuation mode of one call
AGENT_HEADER: Final = "X-Agent-Name"  # names the agent of a call, which is the name of its thread
STEP_HEADER: Final = "X-Step-Id"  # of responses

# Of one connection, not of the message (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
# API keys of TokenTape, which are never forwarded; what TokenTape sets itself; names of rollouts.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    "authorization", "x-api-key", "x-goog-api-key", "host", "content-length", "content-encoding", "accept-encoding", "expect",
    ROLLOUT_HEADER.lower(), GROUP_HEADER.lower(), CONTINUATION_HEADER.lower(), "x-reply-tokens", "x-reply-ids",
    AGENT_HEADER.lower(),
}  # fmt: skip
# What TokenTape sets itself; and what is about the engine's own address and not about its response: addresses behind
# TokenTape, credentials for them, and the permissions that the engine gives to web pages, also those of other origins.
_NOT_DOWNSTREAM = _HOP_BY_HOP | {
    "content-length", "content-encoding", "date", ROLLOUT_HEADER.lower(), STEP_HEADER.lower(),
    "location", "content-location", "refresh", "link", "alt-svc", "via", "x-served-by", "x-backend-server",
    "x-accel-redirect", "x-sendfile",
    "set-cookie", "set-cookie2", "www-authenticate", "authentication-info",
    "timing-allow-origin", "strict-transport-security", "clear-site-data", "service-worker-allowed", "origin-agent-cluster",
    "report-to", "reporting-endpoints", "nel", "sourcemap", "x-sourcemap",
}  # fmt: skip
_NOT_DOWNSTREAM_PREFIXES = ("access-control-", "content-security-policy", "cross-origin-")

# Invalid in header values (RFC 9110, 5.5): aiohttp's server refuses to write them.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def upstream(headers: Iterable[tuple[str, str]], endpoint: Endpoint) -> list[tuple[str, str]]:
    """Return the client's headers as they are sent to an engine, with those of its endpoint."""
    dropped = _NOT_UPSTREAM | endpoint.replaced if endpoint.replaced else _NOT_UPSTREAM
    return [*_passing(headers, dropped), *endpoint.headers]


def downstream(headers: Mapping[str, str], *, rollout_id: str | None, step_id: str | None) -> list[tuple[str, str]]:
    """Return the engine's headers as they are sent to the client, with the ids of the rollout and the step."""
    shown = _passing(headers.items(), _NOT_DOWNSTREAM, _NOT_DOWNSTREAM_PREFIXES)
    if rollout_id is not None:
        shown.append((ROLLOUT_HEADER, rollout_id))
    if step_id is not None:
        shown.append((STEP_HEADER, step_id))
    return shown


def _passing(
    headers: Iterable[tuple[str, str]], dropped: frozenset[str], prefixes: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return the headers that are neither dropped by name or prefix nor listed in a `Connection` header, and can be written.

    aiohttp accepts control characters in the headers of a response, and refuses to write them.
    """
    passing: list[tuple[str, str]] = []
    listed: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if (lower in dropped and lower != "connection") or lower.startswith(prefixes):
            continue
        if not (name.isprintable() and value.isprintable()) and _CONTROL.search(f"{name}{value}"):
            continue
        if lower == "connection":
            listed.update(token.strip().lower() for token in value.split(","))
        else:
            passing.append((name, value))
    return [pair for pair in passing if pair[0].lower() not in listed] if listed else passing
