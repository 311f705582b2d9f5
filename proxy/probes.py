"""Health probes: calls that ask whether somebody answers, and are no turn of any agent.

Holds the telling of probes by what is configured. What is done with one is decided in `calls`.
"""

from collections.abc import Mapping
from typing import Any

from proxy.config import ProbeSettings
from proxy.dialects import Dialect

_BOUNDS = ("max_completion_tokens", "max_tokens")
_MOST_BYTES = 512  # a body with "ping" in it and all its fields; an agent's prompt is longer


def is_probe(
    probes: ProbeSettings, dialect: Dialect, headers: Mapping[str, str], body: Mapping[str, Any], *, body_bytes: int
) -> bool:
    """Whether a call is a probe: by its user agent, or by asking a tiny prompt for one token."""
    agent = headers.get("User-Agent", "").lower()
    if any(name.lower() in agent for name in probes.user_agents):
        return True
    if not probes.one_token or body_bytes > _MOST_BYTES:
        return False
    sampling = dialect.sampling(body)
    bound = next((sampling[name] for name in _BOUNDS if sampling.get(name) is not None), None)
    return type(bound) is int and bound == 1
