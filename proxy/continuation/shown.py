"""The comparison of a reply with the text in which a template renders it."""

import re
from collections.abc import Sequence
from typing import Any, Final

from proxy.continuation.types import Message, Reason
from proxy.trajectory.conversation import bare, text_of, thoughts_of

_EMPTY_THOUGHTS: Final = re.compile(r"<think>\s*</think>")
_OPENS: Final = "<think>"
_CLOSES: Final = "</think>"


def comparable(text: str) -> str:
    """Return a text without whitespace and without empty thoughts, which templates add and drop."""
    return bare(text).replace("<think></think>", "")


def what_is_missing(reply: Message, shown: str) -> Reason | None:
    """Return the part of a reply that a rendered turn does not contain, apart from whitespace; None if it is complete.

    Thoughts within the content, and the names of calls, must be in the order of the reply: each is searched after the one
    before it, so that the time is linear however many there are.
    """
    text = bare(shown)
    thoughts, answer = _split(_EMPTY_THOUGHTS.sub("", text_of(reply)))
    if bare(thoughts_of(reply)) not in text or not _are_in_order(thoughts, text, overlap=True):
        return "reasoning_stripped"
    before, closed, after = answer.rpartition(
        _CLOSES
    )  # without the opening tag, which some templates write in the prompt
    if closed and bare(before) not in text:
        return "reasoning_stripped"
    if bare(after if closed else answer) not in text:
        return "content_stripped"
    return None if _are_in_order(_names(reply), text, overlap=False) else "tool_calls_stripped"


def _split(content: str) -> tuple[list[str], str]:
    """Return the thoughts in a content, and the rest of it. A thought ends with the first closing tag after its opening one."""
    thoughts: list[str] = []
    rest: list[str] = []
    end = 0
    while (start := content.find(_OPENS, end)) >= 0:
        closed = content.find(_CLOSES, start + len(_OPENS))
        if closed < 0:
            break
        rest.append(content[end:start])
        thoughts.append(content[start + len(_OPENS) : closed])
        end = closed + len(_CLOSES)
    return thoughts, "".join((*rest, content[end:]))


def _are_in_order(parts: Sequence[str], text: str, *, overlap: bool) -> bool:
    """Return whether a bare text has these parts in their order; with `overlap`, one may begin where the one before it does."""
    start = 0
    for part in map(bare, parts):
        found = text.find(part, start)
        if found < 0:
            return False
        start = found if overlap else found + len(part)
    return True


def _names(reply: Message) -> list[str]:
    calls: Any = reply.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]
