"""The comparison of a reply with the text in which a template renders it."""

import re
from typing import Any, Final

from proxy.continuation.types import Message, Reason
from proxy.trajectory.conversation import bare, text_of, thoughts_of

_EMPTY_THOUGHTS: Final = re.compile(r"<think>\s*</think>")
_THOUGHTS: Final = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def comparable(text: str) -> str:
    """Return a text without whitespace and without empty thoughts, which templates add and drop."""
    return bare(text).replace("<think></think>", "")


def what_is_missing(reply: Message, shown: str) -> Reason | None:
    """Return the part of a reply that a rendered turn does not contain, apart from whitespace; None if it is complete."""
    text = bare(shown)
    content = _EMPTY_THOUGHTS.sub("", text_of(reply))
    thoughts = [thoughts_of(reply), *_THOUGHTS.findall(content)]
    if not all(bare(thought) in text for thought in thoughts):
        return "reasoning_stripped"
    answer = _THOUGHTS.sub("", content)
    before, closed, after = answer.rpartition(
        "</think>"
    )  # without the opening tag, which some templates write in the prompt
    if closed and bare(before) not in text:
        return "reasoning_stripped"
    if bare(after if closed else answer) not in text:
        return "content_stripped"
    names = _names(reply)
    return "tool_calls_stripped" if any(text.count(bare(name)) < names.count(name) for name in names) else None


def _names(reply: Message) -> list[str]:
    calls: Any = reply.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]
