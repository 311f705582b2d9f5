"""The engines we speak to, one file each: what to ask them, what to hide of their answers, where their tokens are."""

from proxy.engines.base import Ask, Engine, Hidden, Sampled, Tokens
from proxy.engines.vllm import Vllm

__all__ = ["ENGINES", "Ask", "Engine", "Hidden", "Sampled", "Tokens"]

# By kind, as configured. A new engine is one file and one line here.
ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
}
