"""Detection of health probes: calls that only check whether the server responds.

Probes are those that frameworks are known to send, and those of the configuration. A call that names a rollout is never one.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.config.sections import ProbeSettings
from proxy.protocols.dialects import Dialect
from proxy.protocols.dialects.base import DialectName

_BOUNDS: Final = ("max_completion_tokens", "max_tokens")
_MAX_BYTES: Final = 512  # a probe's message and fields fit; an agent's prompt is longer


def _user_message(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


# By dialect, the whole body but the model, as these versions send it; docs/http-api.md has the same table.
KNOWN: Final[Mapping[DialectName, tuple[dict[str, Any], ...]]] = {
    "chat": (
        # atroposlib 0.4.0, OpenAIServer and SGLangServer.check_server_status_task: every second
        _user_message("hi", max_tokens=1),
        # verifiers 0.1.9, RLMEnv._test_logprobs_support: once for an environment
        _user_message("hi", max_tokens=1, logprobs=True),
        # litellm 1.106.2, proxy/health_check.py: every 300 s for a model, one of the two
        _user_message("Hey how's it going?", max_tokens=16),
        _user_message("What's 1 + 1?", max_tokens=16),
    ),
    "completions": (
        # atroposlib 0.4.0, the same classes if the environment uses completions or tokens
        {"prompt": "hi", "max_tokens": 1},
    ),
}


def is_probe(
    probes: ProbeSettings, dialect: Dialect, headers: Mapping[str, str], body: Mapping[str, Any], *, body_bytes: int
) -> bool:
    """Return whether a call that names no rollout is a probe: by its user agent, a known body, or a limit of one token."""
    agent = headers.get("User-Agent", "").lower()
    if any(name.lower() in agent for name in probes.user_agents):
        return True
    if body_bytes > _MAX_BYTES:
        return False
    if probes.known and {key: value for key, value in body.items() if key != "model"} in KNOWN.get(dialect.name, ()):
        return True
    if not probes.one_token:
        return False
    sampling = dialect.sampling(body)
    bound = next((sampling[name] for name in _BOUNDS if sampling.get(name) is not None), None)
    return type(bound) is int and bound == 1
