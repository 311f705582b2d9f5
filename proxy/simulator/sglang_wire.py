"""SGLang's own request fields, headers, limits and errors, and what its responses share.

Sampling, stops, messages and tools are read by `proxy.simulator.requests`, without the fields that only vLLM rejects. Error
messages, the order of keys and the null values are as in SGLang 0.5.23 (cassettes `sglang-0.5.23/*`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from proxy.simulator.engine import JsonObject, experts_as_int32, usage
from proxy.simulator.errors import RequestError, invalid_value
from proxy.simulator.model import Token
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, ChatRequest, CommonFields, read_chat, read_common, read_fields
from proxy.simulator.sampler import TokenDistribution, UnigramTail, as_float32
from proxy.simulator.template import prepare_for_sglang
from proxy.simulator.tokenizer import Tokenizer

_HEADERS: Final = {
    "return_input_ids_in_sglext": "x-sglext-return-input-ids",
    "return_output_ids_in_sglext": "x-sglext-return-output-ids",
    "framed": "x-sglext-ids-framed",
}
# Sampling parameters of `/generate` -> the fields of `CommonFields`.
_COMMON_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
# All parameters of `/generate`; another one is an error.
_PARAMETERS: Final = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias",
    "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
_VLLM_ONLY: Final = {"prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
_DEFAULT_NEW_TOKENS: Final = 128  # of SGLang's SamplingParams

_Ids = list[Annotated[int, Field(ge=0)]]


@validated(frozen=True, slots=True)
class SglangFields:
    """The fields of chat and completions that only SGLang has; `framed` is a header only."""

    return_token_ids: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_meta_info: bool | None = False
    return_input_ids_in_sglext: bool | None = False
    return_output_ids_in_sglext: bool | None = False
    return_routed_experts: bool | None = False
    routed_experts_start_len: int | None = 0
    input_ids: _Ids | None = None
    rid: str | None = None
    framed: bool = False

    @property
    def prompt_ids(self) -> bool:
        """Whether choices have the prompt's ids."""
        return bool(self.return_token_ids or self.return_prompt_token_ids)


@validated(frozen=True, slots=True)
class NativeRequest:
    """The fields of `/generate`, without `sampling_params`."""

    text: str | list[str] | None = None
    input_ids: _Ids | list[_Ids] | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = -1
    top_logprobs_num: Annotated[int, Field(ge=0)] | None = 0
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    rid: str | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the request has a list of prompts, of any length."""
        prompts = self.text if self.text is not None else self.input_ids
        return isinstance(prompts, list) and not (self.text is None and (not prompts or isinstance(prompts[0], int)))

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        prompts: Any = self.text if self.text is not None else self.input_ids
        return list(prompts) if self.is_batch else [prompts]


_SGLANG_FIELDS: Final = TypeAdapter(SglangFields)
_NATIVE: Final = TypeAdapter(NativeRequest)


def request_error(message: str, kind: str = "BadRequestError") -> RequestError:
    """Return the error for a request that SGLang rejects."""
    return RequestError(message, kind=kind)


def read_sglang_fields(body: Body, headers: Mapping[str, str], options: Options) -> SglangFields:
    """Return SGLang's own fields; without `supports_ids_flags`, only `input_ids` and `rid`."""
    body = {key: body[key] for key in SglangFields.__dataclass_fields__ if key in body and key != "framed"}
    flags = {key: True for key, name in _HEADERS.items() if headers.get(name) == "1"}
    fields = read_fields(_SGLANG_FIELDS, body | flags)
    return fields if options.supports_ids_flags else SglangFields(input_ids=fields.input_ids, rid=fields.rid)


def read_sglang_common(body: Body, options: Options) -> CommonFields:
    """Return the fields that chat and completions share."""
    kept = {key: value for key, value in body.items() if key not in _VLLM_ONLY}
    if "no_stop_trim" in body:
        kept["include_stop_str_in_output"] = body["no_stop_trim"]
    if not body.get("stream"):
        kept.pop("stream_options", None)
    return read_common(kept, options)


def read_sglang_chat(body: Body, fields: SglangFields) -> ChatRequest:
    """Return the fields of chat; raises RequestError for a value that is not allowed."""
    if body.get("messages") == []:
        raise request_error("Messages cannot be empty.")
    kept = dict(body)
    if not body.get("logprobs"):
        kept.pop("top_logprobs", None)  # allowed without logprobs (cassette `err_top_without_logprobs`)
    if not body.get("tools") and body.get("tool_choice") == "auto":
        del kept["tool_choice"]
    chat = read_chat(kept, prepare_for_sglang)
    if body.get("stream"):
        _check_stream(fields)
    return chat


def _check_stream(fields: SglangFields) -> None:
    """Raise RequestError for ids in a chat stream (cassette `chat_token_ids_s_plain`)."""
    for name, endpoint in (
        ("return_prompt_token_ids", ""),
        ("return_token_ids", " on /v1/chat/completions"),
        ("return_meta_info", ""),
    ):
        if getattr(fields, name):
            message = (
                f"{name} is not supported with streaming{endpoint}. Please set stream=false when using {name}=true."
            )
            raise request_error(message, "BadRequest")


def read_native(body: Body, options: Options) -> tuple[NativeRequest, CommonFields]:
    """Return the fields of `/generate`; raises RequestError for a value that is not allowed."""
    native = read_fields(_NATIVE, body)
    if (native.text is None) == (native.input_ids is None):
        raise request_error("Either text, input_ids or input_embeds should be provided.")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise request_error("sampling_params must be an object.")
    for name in sampling:
        if name not in _PARAMETERS:
            expected = ", ".join(f"`{parameter}`" for parameter in _PARAMETERS)
            raise request_error(f"unknown field `{name}`, expected one of {expected}", "Bad Request")
    renamed: Body = {_COMMON_NAMES.get(str(key), str(key)): v for key, v in sampling.items() if v is not None}
    common = read_common({"max_tokens": _DEFAULT_NEW_TOKENS, **renamed, "stream": body.get("stream")}, options)
    if common.max_tokens is not None and common.max_tokens < 0:
        raise request_error(f"max_new_tokens must be at least 0, got {common.max_tokens}.")
    return native, common


def sglang_max_tokens(prompt_length: int, requested: int | None, common: CommonFields, options: Options) -> int:
    """Return the number of tokens that may be sampled after a prompt (cassette `err_overlong`).

    Raises RequestError if the prompt or the requested length does not fit into the context window.
    """
    window = options.max_model_len
    if prompt_length >= window:
        message = f"The input ({prompt_length} tokens) is longer than the model's context length ({window} tokens)."
        raise request_error(message)
    if requested is not None and prompt_length + requested > window:
        message = (
            f"Requested token count exceeds the model's maximum context length of {window} tokens. You requested a "
            f"total of {prompt_length + requested} tokens: {prompt_length} tokens from the input messages and "
            f"{requested} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
        raise request_error(message)
    max_tokens = window - prompt_length if requested is None else requested
    if max_tokens < 1:
        raise request_error(f"max_new_tokens must be at least 1, got {max_tokens}.")
    if common.min_tokens > max_tokens:
        raise request_error(f"min_new_tokens must be in [0, max_new_tokens({max_tokens})], got {common.min_tokens}.")
    return max_tokens


LogprobTuple = list[Any]
"""A logprob, the token's id, and its text or None: an entry of `output_token_logprobs`."""


def error_body(error: RequestError) -> JsonObject:
    """Return the body of an error response, which is not nested."""
    return {
        "object": "error",
        "message": str(error),
        "type": error.kind,
        "param": None,
        "code": error.status,
    }


def full_usage(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    """Return the usage of chat, and of completions that are not streamed; reasoning tokens are not counted."""
    details = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
    return usage(prompt_tokens, completion_tokens, **details)


def matched_stop(token: Token) -> int | str | None:
    """Return `matched_stop`: the id or stop string that ended the choice; for the end of a turn, its id."""
    if token.finish_reason != "stop":
        return None
    return token.id if token.stop_reason is None else token.stop_reason


def tempered(distribution: TokenDistribution, temperature: float) -> Callable[[int], float]:
    """Return the function that returns the logprob of a token after temperature: log_softmax(logits / temperature).

    Temperatures 0 and 1 change nothing: logprobs of greedy batches are the model's own. A sampler that truncates the
    vocabulary (top_k, top_p) changes nothing either (SGLang 0.5.23, `layers/sampler.py:208-331`).
    """
    if temperature in {0.0, 1.0}:
        return distribution.logprob
    log_sum = _log_sum(distribution, 1.0 / temperature)
    return lambda token: as_float32(math.log(distribution.probability(token)) / temperature - log_sum)


def _log_sum(distribution: TokenDistribution, power: float) -> float:
    """Return the logarithm of the sum of all probabilities to this power.

    The sum over the tail is cached, because it is the same after every prefix; the likely tokens correct it.
    """
    highest = math.log(max(distribution.likely.values()))
    total = math.exp(_tail_log_sum(distribution.tail, power) - power * highest)
    for token, probability in distribution.likely.items():
        total += math.exp(power * (math.log(probability) - highest))
        total -= math.exp(power * (math.log(distribution.tail.probabilities[token]) - highest))
    return power * highest + math.log(total)


@lru_cache(maxsize=64)
def _tail_log_sum(tail: UnigramTail, power: float) -> float:
    logs = [math.log(probability) for probability in tail.probabilities]
    highest = max(logs)
    return power * highest + math.log(math.fsum(math.exp(power * (log - highest)) for log in logs))


@dataclass(frozen=True, slots=True)
class LogprobFormatter:
    """Formats tokens and their logprobs: after temperature, each token by its own bytes."""

    tokenizer: Tokenizer
    temperature: float

    def chat_entry(self, token: Token, alternatives: int) -> JsonObject:
        """Return an entry of chat's `logprobs.content`."""
        logprob = tempered(token.distribution, self.temperature)

        def entry(i: int) -> JsonObject:
            return {"token": self.text(i), "bytes": list(self.tokenizer.pieces[i]), "logprob": logprob(i)}

        top = token.distribution.top(alternatives) if alternatives else []
        return entry(token.id) | {"top_logprobs": [entry(i) for i in top]}

    def sampled(self, token: Token, *, with_text: bool) -> LogprobTuple:
        """Return the entry of the sampled token."""
        return self._tuples(token, [token.id], with_text=with_text)[0]

    def top(self, token: Token, alternatives: int, *, with_text: bool) -> list[LogprobTuple]:
        """Return the entries of the most likely tokens at the position, most likely first."""
        return self._tuples(token, token.distribution.top(alternatives), with_text=with_text)

    def output(self, tokens: Sequence[Token], alternatives: int, *, with_text: bool) -> JsonObject:
        """Return the keys of `meta_info` with the logprobs of the sampled tokens."""
        keys: JsonObject = {"output_token_logprobs": [self.sampled(token, with_text=with_text) for token in tokens]}
        if alternatives:
            keys["output_top_logprobs"] = [self.top(token, alternatives, with_text=with_text) for token in tokens]
        return keys | {"output_token_logprobs_length": len(tokens)}

    def _tuples(self, token: Token, ids: Sequence[int], *, with_text: bool) -> list[LogprobTuple]:
        logprob = tempered(token.distribution, self.temperature)
        return [[logprob(i), i, self.text(i) if with_text else None] for i in ids]

    def text(self, token: int) -> str:
        """Return the text of a single token; bytes that are not valid UTF-8 become U+FFFD."""
        return self.tokenizer.decode([token])


def finish_reason(tokens: Sequence[Token]) -> JsonObject | None:
    """Return the finish reason of the native API; a choice has no tokens if `max_new_tokens` is 0."""
    if not tokens:
        return {"type": "length", "length": 0}
    last = tokens[-1]
    if last.finish_reason == "stop":
        return {"type": "stop", "matched": matched_stop(last)}
    if last.finish_reason == "length":
        return {"type": "length", "length": len(tokens)}
    if last.finish_reason == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return None


def routed_experts(prompt: Sequence[int], sampled: Sequence[int], start: int = 0) -> str:
    """Return `routed_experts` of one choice, from a token on. Raises RequestError if the prompt is shorter."""
    if not 0 <= start <= len(prompt):
        raise invalid_value(f"routed_experts_start_len={start} is not within the prompt of {len(prompt)} tokens.")
    return experts_as_int32([*prompt, *sampled], start)
