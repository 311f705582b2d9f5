"""What clients may ask of the simulated engine: the fields it reads, their types and their bounds.

Holds the shapes of requests and the checks on their values; it must not hold what is done with them. Fields
that are not named here are ignored, as vLLM ignores what it does not know; so are sampling parameters the
simulator has no use for (penalties, top_p, top_k, logit_bias, structured outputs).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import bad_value, missing, no_model, not_valid
from proxy.simulator.history import Message, prepare_for_vllm
from proxy.simulator.options import Options

_MOST_LOGPROBS: Final = 20  # vLLM's --max-logprobs
_MOST_SAMPLES: Final = 1_024  # a choice costs memory before its first token

Body = dict[str, Any]
Asked = TypeVar("Asked")
Prepare = Callable[[Sequence[Message]], list[Message]]
_TokenId = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


@dataclass(frozen=True, slots=True)
class Common:
    """What chat and completions share: sampling, stops, streaming, and what to return."""

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
    def samples(self) -> int:
        """How many choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_on_chunks(self) -> bool:
        """Whether each chunk of a stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


@dataclass(frozen=True, slots=True)
class Chat:
    """What only chat has."""

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

    @property
    def enable_thinking(self) -> bool | None:
        """Whether the reply shall begin with a thought; None: the request does not say."""
        value = (self.chat_template_kwargs or {}).get("enable_thinking")
        return None if value is None else bool(value)

    @property
    def named_tool(self) -> str | None:
        """The tool that `tool_choice` names."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        return str(function.get("name")) if isinstance(function, dict) else None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        return [] if self.tool_choice == "none" else [tool["function"] for tool in self.tools or ()]


@dataclass(frozen=True, slots=True)
class Completions:
    """What only completions have."""

    prompt: list[_TokenId] | list[list[_TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            return [[]]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


_COMMON: Final = TypeAdapter(Common)
_CHAT: Final = TypeAdapter(Chat)
_COMPLETIONS: Final = TypeAdapter(Completions)


def read_common(body: Body, options: Options) -> Common:
    """The shared fields, checked."""
    common = read_fields(_COMMON, body)
    if options.strict_models and common.model not in {None, options.model}:
        raise no_model(str(common.model), options.model)
    if common.samples < 1:
        raise bad_value(f"n must be at least 1, got {common.n}.")
    if common.samples > _MOST_SAMPLES:
        raise bad_value(f"n must be at most {_MOST_SAMPLES}, got {common.n}.")
    if common.temperature is not None and common.temperature < 0:
        value = common.temperature
        raise bad_value(f"temperature must be non-negative, got {value}.", "temperature", value)
    if common.top_p is not None and not 0 < common.top_p <= 1:
        raise bad_value(f"top_p must be in (0, 1], got {common.top_p}.", "top_p", common.top_p)
    if common.stream_options and not common.stream:
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")
    if common.prompt_logprobs is not None and common.stream:
        raise bad_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    check_logprobs(common.prompt_logprobs, "prompt_logprobs", "prompt")
    return common


def read_chat(body: Body, prepare: Prepare = prepare_for_vllm) -> Chat:
    """The fields of chat, checked; `prepare` makes of its messages what the template is given."""
    chat = read_fields(_CHAT, body)
    if not chat.messages:
        raise bad_value("Cannot apply chat template to an empty conversation. Provide at least one message.")
    _check_tools(chat)
    if chat.top_logprobs and not chat.logprobs:
        raise bad_value("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise bad_value("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    check_logprobs(chat.top_logprobs, "logprobs", "sample")
    return replace(chat, messages=prepare(chat.messages))


def read_completions(body: Body) -> Completions:
    """The fields of completions, checked."""
    completions = read_fields(_COMPLETIONS, body)
    check_logprobs(completions.logprobs, "logprobs", "sample")
    return completions


def read_fields(shape: TypeAdapter[Asked], body: Body) -> Asked:
    """The fields of a shape; refuses a body that has them not, or of other types."""
    try:
        return shape.validate_python(body)
    except ValidationError as fault:
        raise not_valid(fault) from fault


def check_logprobs(count: int | None, param: str, what: str) -> None:
    """Refuse more logprobs than the engine tells, and less than none."""
    if count is not None and count > _MOST_LOGPROBS:
        asked = f"Requested {what} logprobs of {count}, which is greater than max allowed: {_MOST_LOGPROBS}"
        raise bad_value(asked, param, count)
    if count is not None and count < 0:
        raise bad_value(f"`{param}` must be a non-negative value.", param, count)


def ids_to_detokenize(body: Body) -> list[int]:
    """The ids of a request for their text."""
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise bad_value("Give tokens that are a list of ids.", "tokens")
    return ids


def new_version(body: Body) -> str:
    """The label that a request gives the weights."""
    version = body.get("new_version")
    if not isinstance(version, str):
        raise missing("body.new_version")
    return version


def _check_tools(chat: Chat) -> None:
    for place, tool in enumerate(chat.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(f"tools[{place}] must have a function with a name.", "tools")
    if chat.tool_choice is None or chat.tool_choice == "none":
        return
    if not chat.tools:
        raise bad_value("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(chat.tool_choice, dict):
        if chat.named_tool not in {function["name"] for function in chat.functions}:
            raise bad_value("The tool named in `tool_choice` is not among the `tools`.", "tool_choice")
    elif chat.tool_choice not in {"auto", "required"}:
        raise bad_value(
            f"tool_choice must be none, auto, required or name a tool, got {chat.tool_choice!r}.",
            "tool_choice",
        )
