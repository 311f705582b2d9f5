"""The chat template: messages and tools as the text that the simulated model continues.

Holds a ChatML of our own in plain Python, and nothing of ids or sampling. Two of its habits are those that
make the prompts of consecutive turns diverge on real engines: thoughts of turns before the last real user
message are left out, and with thinking switched off the prompt ends in an empty thought that history will not
hold.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.simulator.errors import bad_value

_TOOLS_BEFORE: Final = "# Tools\n\nYou may call these functions, given as one JSON schema a line:\n"
_TOOLS_AFTER: Final = (
    "\n\nTo call one, write its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
_EMPTY_THOUGHT: Final = "<think>\n\n</think>\n\n"

Message = Mapping[str, Any]


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    enable_thinking: bool | None = None,
) -> str:
    """The whole prompt. With `continue_final_message` it ends inside the last message."""
    asked = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    last_asked = asked[-1] if asked else -1
    turns: list[tuple[str, str]] = []
    after_result = False
    for place, message in enumerate(messages):
        role, text = str(message.get("role")), content_text(message.get("content"))
        if role == "assistant":
            text = _assistant(message, text, thought_kept=place > last_asked)
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
        prompt += "<|im_start|>assistant\n" + (_EMPTY_THOUGHT if enable_thinking is False else "")
    return prompt


def content_text(content: object) -> str:
    """The text of a message's content, which is a string, a list of parts of text, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_value("A message's content must be a string or a list of parts.", "messages")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_value(f"The model takes only parts of type text, not {kind}.", "messages")
        texts.append(text)
    return "\n".join(texts)


def to_json(value: object) -> str:
    """JSON as templates write it: the `tojson` of transformers is `json.dumps` with letters that are not escaped."""
    return json.dumps(value, ensure_ascii=False)  # noqa: TID251 - this spelling is the point


def call_text(name: str, arguments: object) -> str:
    """A tool call as the model writes it; arguments that come as a string are taken as they are."""
    written = arguments if isinstance(arguments, str) else to_json(arguments)
    return f'<tool_call>\n{{"name": {to_json(name)}, "arguments": {written}}}\n</tool_call>'


def _assistant(message: Message, text: str, *, thought_kept: bool) -> str:
    """What an assistant's turn said: its thought if that is kept, its text, its tool calls."""
    before, closed, answer = text.rpartition("</think>")
    thought = message.get("reasoning") or message.get("reasoning_content")
    if closed:
        thought, text = before.removeprefix("<think>"), answer
    if thought and thought_kept:
        text = f"<think>{thought}</think>{text}"
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [call_text(str(function["name"]), function["arguments"]) for function in functions]
    gap = "\n" if text and calls and not text.endswith("\n") else ""
    return text + gap + "\n".join(calls)


def _with_tools(turns: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
    """The turns, with the tools told in the system message, which is made if there is none."""
    if not tools:
        return turns
    told = _TOOLS_BEFORE + "\n".join(map(to_json, tools)) + _TOOLS_AFTER
    if turns and turns[0][0] == "system":
        return [("system", f"{turns[0][1]}\n\n{told}"), *turns[1:]]
    return [("system", told), *turns]
