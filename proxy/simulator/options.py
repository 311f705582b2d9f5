"""The options of a simulated engine."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from proxy.simulator.script import Script

Shape = Literal["vllm", "sglang"]


@dataclass(slots=True)
class Faults:
    """Faults that tests switch on and off, also while the engine runs.

    `prompt_ids`, for prompts that are sent as ids: the engine changes the last id, ignores the ids of a chat and renders
    its messages, or rejects them with 400. `tokenize`: the tokenizer endpoint never responds, or responds with this
    status.
    """

    prompt_ids: Literal["changed", "ignored", "rejected"] | None = None
    tokenize: Literal["hangs"] | int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one simulated engine.

    `shape` is the engine whose HTTP API it has. `seed` is used for requests without a seed (None: a random one for each).
    `token_delay_s` is the delay before each token. `strict_models` rejects model names other than `model`, as vLLM does.
    `weight_version` is the initial label of the weights. `routed_experts` returns experts if they are requested.
    With a `script`, chat completions follow the script. `template` is the text of a chat template in Jinja, and `eos` the
    token that ends a turn, `call_eos` the one that ends a turn with tool calls (None: the same), like GLM's
    `<|observation|>`. `noncanonical_rate` is the probability that an ordinary token is sampled as the two tokens that
    make it up, and that a tool call is written in other white space than the template's.
    With `image_tokens` the model takes images, with at least so many placeholder tokens for each (`images`).
    `requests` counts the requests that the engine receives, by path, and `faults` are for tests.

    SGLang only: without `has_parser`, neither reasoning nor tool calls are parsed, and streams lose logprobs, as in
    SGLang 0.5.23; without `supports_ids_flags` it behaves like an older server, which ignores flags for ids. With
    `incremental_streams`, each event of `/generate` continues its choice (`--incremental-streaming-output`).
    vLLM only: `scale_out` enables `/inference/v1/generate`, and `sampling_mask` adds `sampling_mask` to its choices.
    `has_prompt_field` gives chat requests the field `prompt_token_ids`, which no release has.
    """

    model: str = "simulated"
    max_model_len: int = 32_768
    seed: int | None = None
    token_delay_s: float = 0.0
    strict_models: bool = False
    shape: Shape = "vllm"
    weight_version: str = "default"
    has_parser: bool = True
    supports_ids_flags: bool = True
    incremental_streams: bool = False
    scale_out: bool = True
    sampling_mask: bool = False
    has_prompt_field: bool = False
    routed_experts: bool = False
    script: Script | None = None
    template: str | None = None
    eos: str = "<|im_end|>"
    call_eos: str | None = None
    image_tokens: int = 0
    noncanonical_rate: float = 0.0
    faults: Faults = field(default_factory=Faults, compare=False)
    requests: Counter[str] = field(default_factory=Counter, compare=False)
