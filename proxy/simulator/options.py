"""The options of a simulated engine."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from proxy.simulator.script import Cut, Script

Shape = Literal["vllm", "sglang"]


@dataclass(slots=True)
class Faults:
    """Faults that tests switch on and off, also while the engine runs."""

    # Of prompts that are sent as ids: it changes the last id, ignores them and renders the chat, or rejects them with 400.
    prompt_ids: Literal["changed", "ignored", "rejected"] | None = None
    tokenize: Literal["hangs"] | int | None = None  # the tokenizer endpoint never responds, or with this status
    cuts: deque[Cut | None] = field(default_factory=deque)  # of the next calls that sample, one for each


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one simulated engine."""

    model: str = "simulated"
    max_model_len: int = 32_768
    seed: int | None = None  # for requests without a seed; None: a random one for each
    token_delay_s: float = 0.0  # before each token
    strict_models: bool = False  # rejects other model names, as vLLM does
    shape: Shape = "vllm"  # the engine that it imitates
    weight_version: str = "default"  # the initial label of the weights
    has_parser: bool = True  # without one, neither reasoning nor calls are parsed, and SGLang's streams lose logprobs
    supports_ids_flags: bool = True  # without, like an older SGLang, which ignores flags for ids
    incremental_streams: bool = False  # SGLang: each event of `/generate` continues (--incremental-streaming-output)
    scale_out: bool = True  # vLLM: `/inference/v1/generate`
    sampling_mask: bool = False  # vLLM: `sampling_mask` in its choices
    has_prompt_field: bool = False  # vLLM: chat requests have the field `prompt_token_ids`, as in no release
    lists_aborts: bool = False  # vLLM: /openapi.json has `/abort_requests`, as with VLLM_SERVER_DEV_MODE=1
    routed_experts: bool = False  # returns experts if they are requested
    script: Script | None = None  # that chat completions follow
    template: str | None = None  # the text of a chat template in Jinja
    eos: str = "<|im_end|>"  # the token that ends a turn
    call_eos: str | None = None  # ends a turn with tool calls, like GLM's `<|observation|>`; None: the same token
    image_tokens: int = 0  # at least so many placeholder tokens for each image; 0: the model takes none
    # The probability that an ordinary token is sampled as the two tokens that make it up, and that a tool call is written in
    # other white space than the template's.
    noncanonical_rate: float = 0.0
    faults: Faults = field(default_factory=Faults, compare=False)
    requests: Counter[str] = field(default_factory=Counter, compare=False)  # that the engine receives, by path
