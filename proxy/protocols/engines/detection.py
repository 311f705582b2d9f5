"""Identification of the engine behind a URL from its responses to a few harmless requests.

The requests are sent by `proxy.upstream.detection`; none of them samples.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.protocols.engines.base import FollowUpRequest, Traits
from proxy.protocols.engines.quirks import version_numbers
from proxy.protocols.engines.sampling_defaults import read_props

# Of these vLLM 0.32 has /version only; SGLang 0.5.23 its own four (two under older names); llama.cpp /props.
PROBE_PATHS: Final = (
    "/version", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/props", "/v1/models",
)  # fmt: skip

# The owner in /v1/models: the only evidence behind a gateway that forwards only /v1.
_OWNERS: Final = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tokentape-simulator": "vllm"}


_MAX_MODELS: Final = 10_000  # far more than any gateway lists


# SGLang reports the size of its vocabulary nowhere but in this error (0.5.23, run): it checks the ids of biases before a
# request reaches the scheduler, and those of prompts not at all. An earlier version may not check them.
_VOCABULARY: Final = FollowUpRequest(
    "/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 0, "logit_bias": {str(2**31 - 1): 0}}}
)
_CHECKS_BIASES: Final = (0, 5, 23)
_LAST_ID: Final = re.compile(r"logit_bias must has keys in \[0, (\d{1,9})\]")


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """One response: its status, the `Server` header, the JSON of a body with status 200 (None otherwise), the error's text."""

    status: int
    server: str
    body: Any
    error: str = ""


def identify_engine(responses: Mapping[str, ProbeResponse]) -> Traits:
    """Return the engine that sent these responses, by path; `plain` if it is none of the known ones."""
    bodies = {path: response.body if isinstance(response.body, dict) else {} for path, response in responses.items()}
    server_facts = bodies.get("/server_info") or bodies.get("/get_server_info") or {}
    model_facts = bodies.get("/model_info") or bodies.get("/get_model_info") or {}
    owner = _owner(bodies.get("/v1/models") or {})
    props = bodies.get("/props") or {}
    if "weight_version" in model_facts or owner == "sglang":
        facts = {**server_facts, **model_facts}
        return Traits(
            "sglang", _text(facts.get("version")), _has_parser(facts), model=_text(facts.get("served_model_name"))
        )
    if any(response.server.startswith("llama.cpp") for response in responses.values()) or owner == "llamacpp":
        return Traits("llamacpp", _text(props.get("build_info")), sampling_defaults=read_props(props))
    version = _text((bodies.get("/version") or {}).get("version"))
    if version is not None or owner == "vllm":
        return Traits("vllm", version)
    return Traits("plain")


def has_prompt_field(described: Any) -> bool:
    """Return whether an OpenAPI document has `prompt_token_ids` among the fields of vLLM's chat requests."""
    for name in ("components", "schemas", "ChatCompletionRequest", "properties"):
        described = described.get(name) if isinstance(described, dict) else None
    return isinstance(described, dict) and "prompt_token_ids" in described


def vocabulary_request(traits: Traits) -> FollowUpRequest | None:
    """Return the request whose error has the size of a server's vocabulary; None if it may have none."""
    is_checked = traits.kind == "sglang" and version_numbers(traits.version or "") >= _CHECKS_BIASES
    return _VOCABULARY if is_checked else None


def read_vocabulary_size(error: str) -> int | None:
    """Return the size of the vocabulary in an error for a bias of an unknown id; None if it is another error."""
    last = _LAST_ID.search(error)
    return int(last[1]) + 1 if last else None


def model_names(listed: Any) -> frozenset[str] | None:
    """Return the names in a `GET /v1/models` response: id and root (vLLM 0.32), aliases (llama.cpp); None if there are none."""
    models = listed.get("data") if isinstance(listed, dict) else None
    found = [model for model in models[:_MAX_MODELS] if isinstance(model, dict)] if isinstance(models, list) else []
    aliases = [model["aliases"] for model in found if isinstance(model.get("aliases"), list)]
    names = [model.get(field) for model in found for field in ("id", "root")] + [
        name for some in aliases for name in some
    ]
    return frozenset(name for name in names if isinstance(name, str)) or None


def _has_parser(facts: Mapping[str, Any]) -> bool | None:
    """Return whether a reasoning or tool parser is configured; None if the server does not report it."""
    names = ("reasoning_parser", "tool_call_parser")
    if not any(name in facts for name in names):
        return None
    return any(bool(facts.get(name)) for name in names)


def _owner(models: Mapping[str, Any]) -> str | None:
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    return _OWNERS.get(str(first.get("owned_by"))) if isinstance(first, dict) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
