"""The chat template: renders messages and tools as the text that the simulated model continues (ChatML).

Like the templates of real models, it makes the prompts of consecutive turns diverge in two ways: it removes the
reasoning of turns before the last user message, and with reasoning disabled the prompt ends in an empty reasoning block
that later prompts do not contain.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.simulator.errors import invalid_value

# Part of the prompt, hence of the ids that the simulator returns.
_TOOLS_BEFORE: Final = "# Tools\n\nYou may call these functions, given as one JSON schema a line:\n"
_TOOLS_AFTER: Final = (
    "\n\nTo call one, write its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
_EMPTY_REASONING: Final = "<think>\n\n</think>\n\n"

Message = Mapping[str, Any]


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    enable_thinking: bool | None = None,
) -> str:
    """Return the prompt. With `continue_final_message` it ends inside the last message.

    Raises:
        RequestError: a message has content that is not text.
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

    Raises:
        RequestError: the content is something else.
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


def _assistant(message: Message, text: str, *, keep_reasoning: bool) -> str:
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
