"""Prepares the tool calls of earlier turns for the chat template, as vLLM 0.32 and SGLang 0.5.23 do.

Both engines parse `arguments` from JSON, so the template receives an object and serializes it again. They differ in what
else they accept.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RequestError, invalid_fields, invalid_value

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
    """Return the messages with an object as the arguments of each tool call.

    Arguments that are empty, invalid JSON, or JSON of another type become `{}` (vLLM 0.32, renderers/chat_utils.py,
    `_postprocess_messages`).

    Raises:
        RequestError: a call has no id, type or name, or its arguments are not a string.
    """
    return [_prepared(message, _VLLM_CALLS, _object_or_empty) for message in messages]


def prepare_for_sglang(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an object as the arguments of each tool call, or None for a call without arguments.

    Raises:
        RequestError: arguments are a string but not a JSON object (SGLang 0.5.23, entrypoints/openai/serving_chat.py,
            `normalize_assistant_tool_call_arguments`), or a call has no function.
    """
    return [_prepared(message, _SGLANG_CALLS, _object_required) for message in messages]


def _prepared(message: Message, shape: TypeAdapter[Any], parse: Callable[[Any], object]) -> Message:
    tool_calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not tool_calls:
        return message
    if isinstance(tool_calls, list) and any(
        isinstance(call, dict) and call.get("type") == "custom" for call in tool_calls
    ):
        raise invalid_value("chat completions only support assistant tool_calls of type 'function'.", "tool_calls")
    try:
        calls = shape.validate_python(tool_calls)
    except ValidationError as error:
        raise invalid_fields(error) from error
    functions = [{"name": call.function.name, "arguments": parse(call.function.arguments)} for call in calls]
    return {
        **message,
        "tool_calls": [
            {"id": call.id, "type": call.type, "function": function}
            for call, function in zip(calls, functions, strict=True)
        ],
    }


def _object_or_empty(arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)  # noqa: TID251 - vLLM uses json, which accepts more than orjson
    except json.JSONDecodeError:
        return {}
    except ValueError as error:  # an integer of more than 4,300 digits
        raise invalid_value(str(error)) from error
    return parsed if isinstance(parsed, dict) else {}


def _object_required(arguments: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError as error:
        message = "Assistant tool call function.arguments must be valid JSON."
        raise RequestError(message, kind="BadRequest") from error
    if not isinstance(parsed, dict):
        raise RequestError("Assistant tool call function.arguments must be a JSON object.", kind="BadRequest")
    return parsed
