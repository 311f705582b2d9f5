"""Rules for the kinds of threads: patterns of a call's model, system prompt, last user message, tools and agent.

A pattern has `*` for any characters. It is matched part by part; the time is linear in the text for any pattern.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
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

    def has(self, *, model: str | None, system: str, user: str | None, tools: str, agent: str | None) -> bool:
        """Return whether a call matches. `user` is None if any user message may."""
        return (
            (self.model is None or matches(self.model, model or ""))
            and (self.agent is None or matches(self.agent, agent or ""))
            and (self.tools is None or matches(self.tools, tools))
            and (self.system is None or matches(self.system, system))
            and (self.user is None or user is None or matches(self.user, user))
        )


class RuleSearch:
    """Finds the first rule that a call matches. Patterns are compared once with each different prompt."""

    def __init__(self, rules: Sequence[ThreadRule]) -> None:
        self._rules = rules
        self._candidates: dict[Hashable, tuple[int, ...]] = {}

    def first(
        self, *, model: str | None, system: str, tools: frozenset[str], agent: str | None, user: Callable[[], str]
    ) -> int | None:
        """Return the index of the rule. `user` returns the last user message; it is called if a rule has a pattern of it."""
        if not self._rules:
            return None
        key = model, system, tools, agent
        if key not in self._candidates:
            names = " ".join(sorted(tools))
            self._candidates[key] = tuple(
                number
                for number, rule in enumerate(self._rules)
                if rule.has(model=model, system=system, user=None, tools=names, agent=agent)
            )
        text: str | None = None
        for number in self._candidates[key]:
            pattern = self._rules[number].user
            if pattern is None:
                return number
            text = user() if text is None else text
            if matches(pattern, text):
                return number
        return None


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
