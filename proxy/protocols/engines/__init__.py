"""The engines we speak to, one file each: what to ask them, what to hide of their answers, where their tokens are.

Beside them: `losses` (what each is known to lose, and when), and `recognition` (which one a server is).
"""

from proxy.protocols.engines.base import (
    Engine,
    FollowUpRequest,
    Injection,
    InjectionRequest,
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
    "Engine",
    "FollowUpRequest",
    "Injection",
    "InjectionRequest",
    "LogprobsLevel",
    "Sampled",
    "StreamShape",
    "StripRules",
    "Tokens",
    "Traits",
]

# By kind, as configured. A new engine is one file and one line here.
ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "llamacpp": Llamacpp(),
    "plain": TextOnly(),
}
