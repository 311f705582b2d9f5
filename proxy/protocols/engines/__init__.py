"""The supported inference engines, one module each: what to inject into requests, what to strip, where the tokens are.

`quirks` lists the known limitations of each engine, and `detection` identifies the engine behind a URL.
"""

from proxy.protocols.engines.base import (
    CallOptions,
    Engine,
    FollowUpRequest,
    Injection,
    LogprobsLevel,
    Sampled,
    StreamShape,
    StripRules,
    Tokens,
    Traits,
)
from proxy.protocols.engines.llamacpp import Llamacpp
from proxy.protocols.engines.sglang import Sglang
from proxy.protocols.engines.text_only import TextOnly
from proxy.protocols.engines.vllm import Vllm

__all__ = [
    "ENGINES",
    "VLLM_WITH_PROMPT_FIELD",
    "CallOptions",
    "Engine",
    "FollowUpRequest",
    "Injection",
    "LogprobsLevel",
    "Sampled",
    "StreamShape",
    "StripRules",
    "Tokens",
    "Traits",
]

# By kind, as configured. Adding an engine takes one file and one line here.
ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "llamacpp": Llamacpp(),
    "plain": TextOnly(),
}

VLLM_WITH_PROMPT_FIELD: Engine = Vllm(has_prompt_field=True)
