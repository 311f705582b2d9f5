"""The options of a simulated engine.

Holds what whoever starts the engine may choose, and nothing that a request chooses.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What one simulated engine is set to.

    `seed` stands in for the seed of requests that bring none (None: a fresh one each time). `token_delay_s`
    is waited before each token, so that people see a stream. `strict_models` refuses any model name but
    `model`, as vLLM does.
    """

    model: str = "simulated"
    max_model_len: int = 32_768
    seed: int | None = None
    token_delay_s: float = 0.0
    fingerprint: str = "vllm-0.32.0-simulator"
    strict_models: bool = False
