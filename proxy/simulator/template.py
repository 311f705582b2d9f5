"""The chat template, which renders messages and tools as the text that the simulated model continues (ChatML), and what all
templates share: their markers, and the tool calls of earlier turns.

Like the templates of real models, it makes the prompts of consecutive turns diverge in two ways: it removes the reasoning
of turns before the last user message, and with reasoning disabled the prompt ends in an empty reasoning block that later
prompts do not contain.

A marker is a piece of a template's text that becomes a single token, without white space, quotes or braces inside:

    <|name|>  <|name>  <name|>    a bar beside a bracket, ASCII or full-width (U+FF5C, as in DeepSeek's templates)
    <name>  </name>  <ns:name>    a tag without attributes
    [NAME]  [/NAME]               upper-case letters, digits and underscores, at least two

Markers that a template composes, like `'<|' + role + '|>'`, are not found. Comments of the template have no markers. A
template that names `bos_token` or `eos_token` writes these, too.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from proxy.simulator.errors import RequestError, invalid_fields, invalid_value
from proxy.simulator.tokenizer import NAMED_TOKENS

# Part of the prompt, hence of the ids that the simulator returns.
_TOOLS_BEFORE: Final = "# Tools\n\nYou may call these functions, given as one JSON schema a line:\n"
_TOOLS_AFTER: Final = (
    "\n\nTo call one, write its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
_EMPTY_REASONING: Final = "<think>\n\n</think>\n\n"

Message = dict[str, Any]

PLACEHOLDER: Final = "<|image_pad|>"
"""The marker of an image in a prompt, which the engine repeats."""


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    enable_thinking: bool | None = None,
) -> str:
    """Return the prompt. With `continue_final_message` it ends inside the last message.

    Raises RequestError if a message has content that is not text.
    """
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    last_user = users[-1] if users else -1
    turns: list[tuple[str, str]] = []
    after_result = False
    for index, message in enumerate(messages):
        role, text = str(message.get("role")), content_text(message.get("content"))
        if role == "assistant":
            text = _assistant(message, text, keep_reasoning=index > last_user)
        elif role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            role = "user"
            if after_result:
                text = f"{turns.pop()[1]}\n{text}"
        after_result = message.get("role") == "tool"
        turns.append((role, text))
    prompt = "<|im_end|>\n".join(f"<|im_start|>{role}\n{text}" for role, text in _with_tools(turns, tools))
    if not continue_final_message:
        prompt += "<|im_end|>\n"
    if add_generation_prompt:
        prompt += "<|im_start|>assistant\n" + (_EMPTY_REASONING if enable_thinking is False else "")
    return prompt


def content_text(content: object) -> str:
    """Return the text of a message's content: a string, a list of text parts, or None.

    Raises RequestError if the content is something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value("A message's content must be a string or a list of parts.", "messages")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise invalid_value(f"The model takes only parts of type text, not {kind}.", "messages")
        texts.append(text)
    return "\n".join(texts)


def to_json(value: object) -> str:
    """Return JSON as templates write it: transformers' `tojson` is `json.dumps` without escaping of letters."""
    return json_text(value, (", ", ": "))


def json_text(value: object, separators: tuple[str, str]) -> str:
    """Return JSON with these separators of items and of keys."""
    return json.dumps(value, ensure_ascii=False, separators=separators)  # noqa: TID251 - orjson formats differently


COMPACT: Final = (",", ":")
SPACED: Final = (",  ", ":  ")


def call_text(name: str, arguments: object, separators: tuple[str, str] = (", ", ": ")) -> str:
    """Return a tool call as the model writes it; `arguments` that are a string are written unchanged."""
    comma, colon = separators
    arguments_text = arguments if isinstance(arguments, str) else json_text(arguments, separators)
    fields = f'"name"{colon}{to_json(name)}{comma}"arguments"{colon}{arguments_text}'
    return f"<tool_call>\n{{{fields}}}\n</tool_call>"


def _assistant(message: Mapping[str, Any], text: str, *, keep_reasoning: bool) -> str:
    """Return the text of an assistant turn: its reasoning if that is kept, its content, its tool calls."""
    before, closed, answer = text.rpartition("</think>")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if closed:
        reasoning, text = before.removeprefix("<think>"), answer
    if reasoning and keep_reasoning:
        text = f"<think>{reasoning}</think>{text}"
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [call_text(str(function["name"]), function["arguments"]) for function in functions]
    gap = "\n" if text and calls and not text.endswith("\n") else ""
    return text + gap + "\n".join(calls)


def _with_tools(turns: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
    """Return the turns with the tools in the system message; adds one if there is none."""
    if not tools:
        return turns
    text = _TOOLS_BEFORE + "\n".join(map(to_json, tools)) + _TOOLS_AFTER
    if turns and turns[0][0] == "system":
        return [("system", f"{turns[0][1]}\n\n{text}"), *turns[1:]]
    return [("system", text), *turns]


BOS: Final = "<s>"
"""The value of `bos_token`."""

_COMMENT: Final = re.compile(r"\{#.*?#\}", re.DOTALL)
_MARKER: Final = re.compile(
    r"<[|\uff5c][^\s<>{}'\"\\]*>"
    r"|<[^\s<>{}'\"\\|\uff5c]+[|\uff5c]>"
    r"|</?[A-Za-z_][\w:.-]*>"
    r"|\[/?[A-Z][A-Z0-9_]+\]"
)


def uses_bos(template: str) -> bool:
    """Return whether the template writes `bos_token`."""
    return "bos_token" in _COMMENT.sub("", template)


def markers_of(template: str, eos: str) -> list[str]:
    """Return the markers that are not tokens of every simulated model, in the order of the template."""
    text = _COMMENT.sub("", template)
    found = _MARKER.findall(text)
    found += [BOS] if uses_bos(template) else []
    found += [eos] if "eos_token" in text else []
    return [marker for marker in dict.fromkeys(found) if marker not in NAMED_TOKENS]


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
    `_postprocess_messages`). Raises RequestError if a call has no id, type or name, or its arguments are not a string.
    """
    return [_prepared(message, _VLLM_CALLS, _object_or_empty) for message in messages]


def prepare_for_sglang(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an object as the arguments of each tool call, or None for a call without arguments.

    Raises RequestError if arguments are a string but not a JSON object (SGLang 0.5.23, entrypoints/openai/serving_chat.py,
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
