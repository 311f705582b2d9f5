"""What clients may ask of an engine that speaks SGLang's protocol, beside what it shares with vLLM.

Holds SGLang's own fields, headers and refusals; sampling, stops, messages and tools are read by `requests`, once
what only vLLM refuses is taken out. Sentences are those of SGLang 0.5.23.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RefusedError
from proxy.simulator.history import prepare_for_sglang
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, Chat, Common, read_chat, read_common, read_fields

_HEADERS: Final = {
    "return_input_ids_in_sglext": "x-sglext-return-input-ids",
    "return_output_ids_in_sglext": "x-sglext-return-output-ids",
    "framed": "x-sglext-ids-framed",
}
# The names that sampling parameters of `/generate` have elsewhere.
_NATIVE: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_NOT_SHARED: Final = {"prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}  # vLLM's
_DEFAULT_NEW_TOKENS: Final = 128  # of SGLang's SamplingParams

_Ids = list[Annotated[int, Field(ge=0)]]


@dataclass(frozen=True, slots=True)
class Flags:
    """What chat and completions may be asked to tell of their tokens, and prompts of ids. `framed` is a header only."""

    return_token_ids: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_meta_info: bool | None = False
    return_input_ids_in_sglext: bool | None = False
    return_output_ids_in_sglext: bool | None = False
    return_routed_experts: bool | None = False
    input_ids: _Ids | None = None
    rid: str | None = None
    framed: bool = False

    @property
    def prompt_ids(self) -> bool:
        """Whether choices tell the ids of the prompt."""
        return bool(self.return_token_ids or self.return_prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Native:
    """The fields of `/generate`, but `sampling_params`."""

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
        """Whether there are several prompts, be they one."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and not (self.text is None and (not given or isinstance(given[0], int)))

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        given: Any = self.text if self.text is not None else self.input_ids
        return list(given) if self.is_batch else [given]


_FLAGS: Final = TypeAdapter(Flags)
_NATIVE_FIELDS: Final = TypeAdapter(Native)


def refused(message: str, kind: str = "BadRequestError") -> RefusedError:
    """A request that SGLang does not take."""
    return RefusedError(message, kind=kind)


def read_flags(body: Body, headers: Mapping[str, str], options: Options) -> Flags:
    """SGLang's own fields; an older server knows no flag that asks for ids."""
    body = {key: body[key] for key in Flags.__dataclass_fields__ if key in body and key != "framed"}
    flags = read_fields(_FLAGS, body | {key: True for key, name in _HEADERS.items() if headers.get(name) == "1"})
    return flags if options.knows_ids_flags else Flags(input_ids=flags.input_ids, rid=flags.rid)


def read_shared(body: Body, options: Options) -> Common:
    """The fields that every endpoint has."""
    kept = {key: value for key, value in body.items() if key not in _NOT_SHARED}
    if "no_stop_trim" in body:
        kept["include_stop_str_in_output"] = body["no_stop_trim"]
    if not body.get("stream"):
        kept.pop("stream_options", None)
    return read_common(kept, options)


def read_sglang_chat(body: Body, flags: Flags) -> Chat:
    """The fields of chat, checked."""
    if body.get("messages") == []:
        raise refused("Messages cannot be empty.")
    kept = dict(body)
    if not body.get("logprobs"):
        kept.pop("top_logprobs", None)  # without logprobs they are no fault (cassette `chat_top_without_logprobs`)
    if not body.get("tools") and body.get("tool_choice") == "auto":
        del kept["tool_choice"]
    chat = read_chat(kept, prepare_for_sglang)
    if body.get("stream"):
        _refuse_stream(flags)
    return chat


def _refuse_stream(flags: Flags) -> None:
    """A stream of chat tells no ids in its choices (cassette `chat_stream_return_token_ids_REJECTED`)."""
    for name, where in (
        ("return_prompt_token_ids", ""),
        ("return_token_ids", " on /v1/chat/completions"),
        ("return_meta_info", ""),
    ):
        if getattr(flags, name):
            message = f"{name} is not supported with streaming{where}. Please set stream=false when using {name}=true."
            raise refused(message, "BadRequest")


def read_native(body: Body, options: Options) -> tuple[Native, Common]:
    """The fields of `/generate`, checked."""
    asked = read_fields(_NATIVE_FIELDS, body)
    if (asked.text is None) == (asked.input_ids is None):
        raise refused("Either text, input_ids or input_embeds should be provided.")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise refused("sampling_params must be an object.")
    spelt: Body = {_NATIVE.get(str(key), str(key)): value for key, value in sampling.items() if value is not None}
    common = read_common({"max_tokens": _DEFAULT_NEW_TOKENS, **spelt, "stream": body.get("stream")}, options)
    if common.max_tokens is not None and common.max_tokens < 0:
        raise refused(f"max_new_tokens must be at least 0, got {common.max_tokens}.")
    return asked, common


def sglang_room(prompt_length: int, asked: int | None, common: Common, options: Options) -> int:
    """How many tokens may be sampled after a prompt; refuses what does not fit (cassette `chat_overlong`)."""
    window = options.max_model_len
    if prompt_length >= window:
        message = f"The input ({prompt_length} tokens) is longer than the model's context length ({window} tokens)."
        raise refused(message)
    if asked is not None and prompt_length + asked > window:
        message = (
            f"Requested token count exceeds the model's maximum context length of {window} tokens. "
            f"You requested a total of {prompt_length + asked} tokens: {prompt_length} tokens from the input messages "
            f"and {asked} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
        raise refused(message)
    room = window - prompt_length if asked is None else asked
    if room < 1:
        raise refused(f"max_new_tokens must be at least 1, got {room}.")
    if common.min_tokens > room:
        raise refused(f"min_new_tokens must be in [0, max_new_tokens({room})], got {common.min_tokens}.")
    return room
