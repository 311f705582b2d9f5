"""Request bodies: the fields that both engines read, their types and bounds.

Other fields are ignored, as vLLM ignores fields that it does not know. That includes sampling parameters that the
simulator does not implement: penalties, top_p, top_k, logit_bias, structured outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RequestError, invalid_fields, invalid_value, missing_field
from proxy.simulator.options import Options
from proxy.simulator.template import Message, prepare_for_vllm

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
