"""Rules for the kinds of threads: patterns of a call's model, system prompt, last user message, tools and agent.

A pattern has `*` for any characters. It is matched part by part; the time is linear in the text for any pattern.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ThreadKind: TypeAlias = Literal["main", "sub-agent", "compaction", "auxiliary"]
Wanted: TypeAlias = Literal["all", "agents", "main"]

KINDS_OF: Final[Mapping[Wanted, frozenset[ThreadKind]]] = {
    "all": frozenset({"main", "sub-agent", "compaction", "auxiliary"}),
    "agents": frozenset({"main", "sub-agent", "compaction"}),
    "main": frozenset({"main"}),
}


@dataclass(frozen=True, slots=True)
class ThreadRule:
    """The kind of the calls that match all its patterns; a pattern that is None matches any call.

    `tools` is a pattern of the sorted names of the call's tools, with spaces between them.
    """

    kind: ThreadKind
    model: str | None = None
    system: str | None = None
    user: str | None = None
    tools: str | None = None
    agent: str | None = None

    def has(self, *, model: str | None, system: str, user: str, tools: str, agent: str | None) -> bool:
        """Return whether a call matches."""
        return (
            (self.model is None or matches(self.model, model or ""))
            and (self.agent is None or matches(self.agent, agent or ""))
            and (self.tools is None or matches(self.tools, tools))
            and (self.system is None or matches(self.system, system))
            and (self.user is None or matches(self.user, user))
        )


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches the whole text."""
    first, *middle = pattern.split("*")
    if not middle:
        return text == pattern
    last = middle.pop()
    if not text.startswith(first):
        return False
    position, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return position <= end and text.endswith(last)


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """The rules of a proxy, and which threads are exported by default; None: all of them, and rows do not name them."""

    rules: tuple[ThreadRule, ...] = ()
    default: Wanted | None = None
