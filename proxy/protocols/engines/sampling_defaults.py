"""The sampling defaults of an engine: its values for fields that a request omits.

vLLM (0.32.0) takes them from the model's generation_config.json and --override-generation-config, for chat and completions;
only the response of `/v1/chat/completions/render` shows them, which is a 403 without --enable-scale-out.
llama.cpp (2026.10) shows them in `/props`. SGLang (0.5.23) does not show them.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.engines.base import FollowUpRequest

DEFAULTED: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip

_RENDER: Final = FollowUpRequest(
    "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
)


def sampling_defaults_request(kind: str) -> FollowUpRequest | None:
    """Return the request whose response shows the defaults of an engine of this kind; None if there is none."""
    return _RENDER if kind == "vllm" else None


def read_rendered(response: Any) -> dict[str, float] | None:
    """Return the defaults in vLLM's response; None if it has none."""
    return _numbers(response.get("sampling_params")) if isinstance(response, dict) else None


def read_props(props: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the defaults in llama.cpp's `/props`; None if it has none. Its penalty for repetition has another name."""
    settings = props.get("default_generation_settings")
    return _numbers(settings.get("params")) if isinstance(settings, dict) else None


def _numbers(params: Any) -> dict[str, float] | None:
    if not isinstance(params, dict):
        return None
    found = {name: params[name] for name in DEFAULTED if type(params.get(name)) in (int, float)}
    return found or None
