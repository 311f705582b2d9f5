"""Tool calls of earlier turns, as an engine prepares them for its chat template.

Holds what vLLM 0.32 and SGLang 0.5.23 do before any template is rendered: both parse `arguments` from JSON, so a template
sees an object and writes it in its own spelling. They differ in what else they accept.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RefusedError, bad_value, not_valid

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _VllmFunction:
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class _VllmCall:
    id: str
    type: Literal["function"]
    function: _VllmFunction


@dataclass(frozen=True, slots=True)
class _SglangFunction:
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _SglangCall:
    function: _SglangFunction
    id: str | None = None
    type: Literal["function"] = "function"


_VLLM_CALLS: Final = TypeAdapter(list[_VllmCall])
_SGLANG_CALLS: Final = TypeAdapter(list[_SglangCall])


def prepare_for_vllm(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls have an object as arguments.

    Arguments that are empty, invalid JSON, or JSON of another type become `{}` (vLLM 0.32, renderers/chat_utils.py,
    `_postprocess_messages`). Raises RefusedError for a call without id, type or name, or whose arguments are no string.
    """
    return [_prepared(message, _VLLM_CALLS, _object_or_empty) for message in messages]


def prepare_for_sglang(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls have an object as arguments, or None where a call had none.

    Raises RefusedError for a string that is not a JSON object (SGLang 0.5.23, entrypoints/openai/serving_chat.py,
    `normalize_assistant_tool_call_arguments`), and for a call without function.
    """
    return [_prepared(message, _SGLANG_CALLS, _object_or_refused) for message in messages]


def _prepared(message: Message, shape: TypeAdapter[Any], read: Callable[[Any], object]) -> Message:
    written = message.get("tool_calls")
    if message.get("role") != "assistant" or not written:
        return message
    if isinstance(written, list) and any(isinstance(call, dict) and call.get("type") == "custom" for call in written):
        raise bad_value("chat completions only support assistant tool_calls of type 'function'.", "tool_calls")
    try:
        calls = shape.validate_python(written)
    except ValidationError as fault:
        raise not_valid(fault) from fault
    functions = [{"name": call.function.name, "arguments": read(call.function.arguments)} for call in calls]
    return {**message, "tool_calls": [{"function": function} for function in functions]}


def _object_or_empty(arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)  # noqa: TID251 - what vLLM reads it with takes more
    except json.JSONDecodeError:
        return {}
    except ValueError as fault:  # a number of more than 4,300 digits
        raise bad_value(str(fault)) from fault
    return parsed if isinstance(parsed, dict) else {}


def _object_or_refused(arguments: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError as fault:
        message = "Assistant tool call function.arguments must be valid JSON."
        raise RefusedError(message, kind="BadRequest") from fault
    if not isinstance(parsed, dict):
        raise RefusedError("Assistant tool call function.arguments must be a JSON object.", kind="BadRequest")
    return parsed
