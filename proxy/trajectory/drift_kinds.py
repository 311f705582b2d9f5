"""The kinds of drift, and their detection from the texts around a boundary.

Bytes that are not a whole character decode to U+FFFD: where a window cuts a character, and where a sampled token was
never completed. They are omitted from every comparison, because engines show, drop or re-encode them.
"""

from typing import Any, Final, Literal

from proxy.trajectory.conversation import bare, calls_tools, text_of, thoughts_of

Kind = Literal[
    "reasoning_stripped", "tool_call_rewritten", "retokenized", "whitespace", "template", "edited", "other", "unexplained"
]  # fmt: skip

KINDS: Final[dict[Kind, str]] = {
    "reasoning_stripped": "The prompt no longer contains reasoning of an earlier reply.",
    "tool_call_rewritten": "A tool call was formatted differently, such as other whitespace or another order of its "
    "arguments.",
    "retokenized": "The same text was tokenized differently.",
    "whitespace": "The text differs only in whitespace, outside of tool calls.",
    "template": "The chat template rendered an earlier turn, or the text around it, differently.",
    "edited": "The agent changed a message.",
    "other": "The texts are known, but none of these kinds applies.",
    "unexplained": "Not known yet because the texts could not be requested; it is determined on a later request.",
}

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_NEAR: Final = 8  # characters on either side by which a position is found in a message


def kind_by_texts(message: Any, expected: str, found: str, *, in_reply: bool, may_lose_thoughts: bool) -> Kind:
    """Return why two texts differ within a reply, or in the few tokens before it.

    `message` is the reply, which was sent back unchanged. `in_reply`: they differ within its sampled ids.
    `may_lose_thoughts`: it has reasoning and was sent back with it, so that only the template can have dropped it.
    """
    expected, found = expected.replace(_REPLACEMENT, ""), found.replace(_REPLACEMENT, "")
    # A parser may take the marks of empty thoughts out of the message.
    if (in_reply or may_lose_thoughts) and expected.count("think>") > found.count("think>"):
        return "reasoning_stripped"
    if _agree(expected, found):
        return "retokenized"
    if in_reply and _part_in_call(message, expected, found):
        return "tool_call_rewritten"
    if in_reply and _agree(bare(expected), bare(found)):
        return "whitespace"
    if may_lose_thoughts:
        return "reasoning_stripped"
    return "other" if in_reply else "template"


def _agree(one: str, other: str) -> bool:
    """Return whether two texts are equal up to the end of the shorter one: the same number of ids may have more text in one."""
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]


def _part_in_call(message: Any, expected: str, found: str) -> bool:
    """Return whether the texts differ where the reply's tool calls are written: neither in its content nor in its reasoning."""
    if not calls_tools(message):
        return False
    pairs = enumerate(zip(expected, found, strict=False))
    start = next((index for index, (left, right) in pairs if left != right), len(found))
    before, after = bare(expected[:start])[-_NEAR:], bare(expected[start:])[:_NEAR]
    return not any(_touches(text, before, after) for text in map(bare, (thoughts_of(message), text_of(message))))


def _touches(text: str, before: str, after: str) -> bool:
    """Return whether a position with these characters before and after it is in a text, or at its end."""
    if len(text) < 2 * _NEAR:
        first = max(len(before) - len(text), 0)
        return bool(text) and any((before + after).startswith(text, index) for index in range(first, len(before) + 1))
    return any(around and around in text for around in (before, after))
