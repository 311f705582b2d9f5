"""Request bodies: the fields that the engines read, their types and bounds.

Other fields are ignored, as vLLM ignores fields that it does not know. That includes sampling parameters that the
simulator does not implement: penalties, top_p, top_k, logit_bias, structured outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RequestError, invalid_fields, invalid_value, missing_field
from proxy.simulator.options import Options
from proxy.simulator.template import Message, prepare_for_sglang, prepare_for_vllm

_MAX_LOGPROBS: Final = 20  # vLLM's --max-logprobs
_MAX_CHOICES: Final = 1_024  # a choice takes memory before its first token

Body = dict[str, Any]
Fields = TypeVar("Fields")
PrepareMessages = Callable[[Sequence[Message]], list[Message]]
_TokenId = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


@dataclass(frozen=True, slots=True)
class CommonFields:
    """The fields that chat and completions share: sampling, stops, streaming, and what to return."""

    model: str | None = None
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    request_id: str | None = None

    @property
    def choices(self) -> int:
        """The number of choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The fields that only chat has."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    return_prompt_text: bool | None = None
    add_special_tokens: Any = False
    chat_template: Any = None
    documents: Any = None
    reasoning_effort: Any = None

    @property
    def enable_thinking(self) -> bool | None:
        """`enable_thinking` of the template; None if the request does not set it."""
        value = (self.chat_template_kwargs or {}).get("enable_thinking")
        return None if value is None else bool(value)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What a Jinja template gets beside messages and tools (vLLM 0.32, `ChatCompletionRequest.build_chat_params`)."""
        variables: dict[str, Any] = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort is not None and "enable_thinking" not in (self.chat_template_kwargs or {}):
            variables["enable_thinking"] = self.reasoning_effort != "none"
        given = {key: value for key, value in variables.items() if value is not None}
        return {**(self.chat_template_kwargs or {}), **given}

    @property
    def named_tool(self) -> str | None:
        """The tool that `tool_choice` names."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        return str(function.get("name")) if isinstance(function, dict) else None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that the model may call."""
        return [] if self.tool_choice == "none" else [tool["function"] for tool in self.tools or ()]


@dataclass(frozen=True, slots=True)
class CompletionsRequest:
    """The fields that only completions have."""

    prompt: list[_TokenId] | list[list[_TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: Any = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            return [[]]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


_COMMON: Final = TypeAdapter(CommonFields)
_CHAT: Final = TypeAdapter(ChatRequest)
_COMPLETIONS: Final = TypeAdapter(CompletionsRequest)


def read_common(body: Body, options: Options) -> CommonFields:
    """Return the shared fields. Like all readers here, raises RequestError for a value that is not allowed."""
    common = read_fields(_COMMON, body)
    if options.strict_models and common.model not in {None, options.model}:
        message = f"The model `{common.model}` does not exist. Valid aliases: {options.model}."
        raise RequestError(message, "model", status=404, kind="NotFoundError")
    if common.choices < 1:
        raise invalid_value(f"n must be at least 1, got {common.n}.")
    if common.choices > _MAX_CHOICES:
        raise invalid_value(f"n must be at most {_MAX_CHOICES}, got {common.n}.")
    if common.temperature is not None and common.temperature < 0:
        value = common.temperature
        raise invalid_value(f"temperature must be non-negative, got {value}.", "temperature", value)
    if common.top_p is not None and not 0 < common.top_p <= 1:
        raise invalid_value(f"top_p must be in (0, 1], got {common.top_p}.", "top_p", common.top_p)
    if common.stream_options and not common.stream:
        raise invalid_value("Stream options can only be defined when `stream=True`.", "stream_options")
    if common.prompt_logprobs is not None and common.stream:
        raise invalid_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    check_logprobs(common.prompt_logprobs, "prompt_logprobs", "prompt")
    return common


def read_chat(body: Body, prepare: PrepareMessages = prepare_for_vllm, *, has_ids: bool = False) -> ChatRequest:
    """Return the fields of chat, with the messages prepared for the template by `prepare`.

    With `has_ids` the prompt is given as ids, and there may be no messages.
    """
    chat = read_fields(_CHAT, body)
    if not chat.messages and not has_ids:
        raise invalid_value("Cannot apply chat template to an empty conversation. Provide at least one message.")
    _check_tools(chat)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid_value("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise invalid_value("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    check_logprobs(chat.top_logprobs, "logprobs", "sample")
    return replace(chat, messages=prepare(chat.messages))


def read_completions(body: Body) -> CompletionsRequest:
    """Return the fields of completions."""
    completions = read_fields(_COMPLETIONS, body)
    check_logprobs(completions.logprobs, "logprobs", "sample")
    return completions


def read_fields(shape: TypeAdapter[Fields], body: Body) -> Fields:
    """Return the fields of a shape; raises RequestError if they are missing or of the wrong type."""
    try:
        return shape.validate_python(body)
    except ValidationError as error:
        raise invalid_fields(error) from error


def check_logprobs(count: int | None, param: str, kind: str) -> None:
    """Raise RequestError for a number of logprobs that is out of bounds."""
    if count is not None and count > _MAX_LOGPROBS:
        message = f"Requested {kind} logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise invalid_value(message, param, count)
    if count is not None and count < 0:
        raise invalid_value(f"`{param}` must be a non-negative value.", param, count)


def ids_to_detokenize(body: Body) -> list[int]:
    """Return the ids of a `/detokenize` request."""
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise invalid_value("tokens must be a list of ids.", "tokens")
    return ids


def new_version(body: Body) -> str:
    """Return the label of an `/update_weight_version` request."""
    version = body.get("new_version")
    if not isinstance(version, str):
        raise missing_field("body.new_version")
    return version


def _check_tools(chat: ChatRequest) -> None:
    for index, tool in enumerate(chat.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid_value(f"tools[{index}] must have a function with a name.", "tools")
    if chat.tool_choice is None or chat.tool_choice == "none":
        return
    if not chat.tools:
        raise invalid_value("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(chat.tool_choice, dict):
        if chat.named_tool not in {function["name"] for function in chat.functions}:
            raise invalid_value("The tool named in `tool_choice` is not among the `tools`.", "tool_choice")
    elif chat.tool_choice not in {"auto", "required"}:
        raise invalid_value(
            f"tool_choice must be none, auto, required or name a tool, got {chat.tool_choice!r}.",
            "tool_choice",
        )


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
    input_ids: list[_TokenId] | None = None
    rid: str | None = None
    separate_reasoning: bool | None = True
    framed: bool = False

    @property
    def prompt_ids(self) -> bool:
        """Whether choices have the prompt's ids."""
        return bool(self.return_token_ids or self.return_prompt_token_ids)


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """The fields of `/generate`, without `sampling_params`."""

    text: str | list[str] | None = None
    input_ids: list[_TokenId] | list[list[_TokenId]] | None = None
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


def read_sglang_fields(body: Body, headers: Mapping[str, str], options: Options) -> SglangFields:
    """Return SGLang's own fields; without `supports_ids_flags`, only `input_ids`, `rid` and `separate_reasoning`."""
    body = {key: body[key] for key in SglangFields.__dataclass_fields__ if key in body and key != "framed"}
    flags = {key: True for key, name in _HEADERS.items() if headers.get(name) == "1"}
    fields = read_fields(_SGLANG_FIELDS, body | flags)
    if options.supports_ids_flags:
        return fields
    return SglangFields(input_ids=fields.input_ids, rid=fields.rid, separate_reasoning=fields.separate_reasoning)


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
        raise invalid_value("Messages cannot be empty.")
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
            raise RequestError(message, kind="BadRequest")


def read_native(body: Body, options: Options) -> tuple[NativeRequest, CommonFields]:
    """Return the fields of `/generate`; raises RequestError for a value that is not allowed."""
    native = read_fields(_NATIVE, body)
    if (native.text is None) == (native.input_ids is None):
        raise invalid_value("Either text, input_ids or input_embeds should be provided.")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise invalid_value("sampling_params must be an object.")
    for name in sampling:
        if name not in _PARAMETERS:
            expected = ", ".join(f"`{parameter}`" for parameter in _PARAMETERS)
            raise RequestError(f"unknown field `{name}`, expected one of {expected}", kind="Bad Request")
    renamed: Body = {_COMMON_NAMES.get(str(key), str(key)): v for key, v in sampling.items() if v is not None}
    common = read_common({"max_tokens": _DEFAULT_NEW_TOKENS, **renamed, "stream": body.get("stream")}, options)
    if common.max_tokens is not None and common.max_tokens < 0:
        raise invalid_value(f"max_new_tokens must be at least 0, got {common.max_tokens}.")
    return native, common
