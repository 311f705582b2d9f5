"""Twins of a conversation: variants that show where the template ends the turn of a reply, and what it writes after it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.continuation.types import Message
from proxy.trajectory.conversation import calls_tools, text_of

# Both differ in their first and their last letter, so that the common suffix of two renderings begins after them.
WORD: Final = "Quartz"
OTHER_WORD: Final = "melody"
_REPLACEMENTS: Final = (
    "Kiwi",
    "Bolt",
    "Ufer",
    "Xeno",
    "Jade",
    "Wolf",
    "Amber",
    "Nile",
    "0range",
    "7even",
    "Zebra",
    "Yarn",
    "Echo",
)
_THOUGHTS: Final = ("<think>", "</think>")


def stand_in(reply: Message, word: str) -> Message:
    """Return a message of the same structure as a reply, with this word as its content, reasoning and arguments.

    The word of each part but the content has another number before it.
    """
    message: dict[str, Any] = dict(reply)
    text = text_of(reply)
    if text:
        message["content"] = f"<think>\n1{word}\n</think>\n\n{word}" if all(tag in text for tag in _THOUGHTS) else word
    for name in ("reasoning", "reasoning_content"):
        if message.get(name):
            message[name] = f"2{word}"
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [_call(call, f"{number}{word}") for number, call in enumerate(calls, 3)]
    elif not text and not message.get("reasoning") and not message.get("reasoning_content"):
        message["content"] = word
    return message


def repeats_a_part(text: str) -> bool:
    """Return whether a rendering of a stand-in contains the word of one of its parts twice."""
    words = re.findall(rf"(?<!\d)\d*{WORD}", text, re.IGNORECASE)  # each run of digits is read once
    return len(words) > len(set(words))


def other_forms(reply: Message) -> list[Message]:
    """Return a reply with its calls alone, if it has more, and with a text alone, unless it is one."""
    text = {"role": reply["role"], "content": WORD}
    parts = [name for name in ("content", "reasoning", "reasoning_content") if reply.get(name)]
    if not calls_tools(reply):
        return [text] if parts != ["content"] else []
    calls = {name: "" if name in parts else value for name, value in reply.items()}
    return [calls, text] if parts else [text]


def other_texts(new: Sequence[Message]) -> tuple[str, list[Message]]:
    """Return a word, and messages with it in place of each text.

    The word begins with another letter than all texts. It is empty if no word does.
    """
    first = {text.lstrip()[:1].lower() for message in new for text in _texts(message)}
    word = next((word for word in _REPLACEMENTS if word[0].lower() not in first), "")
    return word, [_with_word(message, word) for message in new]


def _call(call: Any, word: str) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    return {**call, "function": {**call["function"], "arguments": orjson.dumps({"x": word}).decode()}}


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = (
        [content]
        if isinstance(content, str)
        else [str(part.get("text")) for part in parts if isinstance(part, Mapping)]
    )
    return texts + [str(message[name]) for name in ("reasoning", "reasoning_content") if message.get(name)]


def _with_word(message: Message, word: str) -> Message:
    """Return a message with all its texts replaced; the structure of its content stays."""
    changed: dict[str, Any] = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        changed["content"] = [{**part, "text": word} for part in content]
    elif content is not None or not message.get("tool_calls"):
        changed["content"] = word
    for name in ("reasoning", "reasoning_content"):
        if message.get(name):
            changed[name] = word
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [_call(call, word) for call in message["tool_calls"]]
    return changed
