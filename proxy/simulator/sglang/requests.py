"""SGLang's own request fields, headers, limits and errors.

Sampling, stops, messages and tools are read by `proxy.simulator.requests`, without the fields that only vLLM rejects.
Error messages are those of SGLang 0.5.23.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RequestError
from proxy.simulator.history import prepare_for_sglang
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, ChatRequest, CommonFields, read_chat, read_common, read_fields

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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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

    Raises:
        RequestError: the prompt or the requested length does not fit into the context window.
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
