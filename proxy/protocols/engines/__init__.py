"""The supported inference engines, one module each: what to inject into requests, what to strip, where the tokens are.

`identify_engine` identifies the engine behind a URL from its responses to a few harmless requests, without sampling.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.engines.base import Engine, Probed, ProbeResponse, Traits
from proxy.protocols.engines.llamacpp import Llamacpp
from proxy.protocols.engines.sglang import Sglang
from proxy.protocols.engines.text_only import TextOnly
from proxy.protocols.engines.vllm import Vllm

# By kind, as configured. Adding an engine takes one file and one line here.
ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "llamacpp": Llamacpp(),
    "plain": TextOnly(),
}

# Some gateways forward only `/v1/models`.
PROBE_PATHS: Final = (*(path for engine in ENGINES.values() for path in engine.probe_paths), "/v1/models")
_MAX_MODELS: Final = 10_000  # far more than any gateway lists


def identify_engine(responses: Mapping[str, ProbeResponse]) -> Traits:
    """Return the engine that sent these responses (by path); `plain` if it is unknown."""
    probed = Probed(responses)
    for engine in reversed(ENGINES.values()):  # vLLM's evidence, a version, is the weakest
        if (traits := engine.identify(probed)) is not None:
            return traits
    return Traits("plain")


def model_names(listed: Any) -> frozenset[str] | None:
    """Return the names in a `GET /v1/models` response: id and root (vLLM 0.32), aliases (llama.cpp); None if there are none."""
    models = listed.get("data") if isinstance(listed, dict) else None
    found = [model for model in models[:_MAX_MODELS] if isinstance(model, dict)] if isinstance(models, list) else []
    aliases = [model["aliases"] for model in found if isinstance(model.get("aliases"), list)]
    names = [model.get(field) for model in found for field in ("id", "root")] + [
        name for some in aliases for name in some
    ]
    return frozenset(name for name in names if isinstance(name, str)) or None
