"""What distinguishes the conversations of a rollout: model, system prompt, tools and first messages of their steps."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, TypeVar

import orjson

from proxy.trajectory.conversations import Digests, calls_of, replies_of, role_of, text_of
from proxy.trajectory.step import Step, messages_of
from proxy.trajectory.thread_rules import agent_of

T = TypeVar("T")

_INSTRUCTIONS: Final = ("system", "developer")
_DIGITS: Final = b"0123456789"
_SIMILAR: Final = 0.8  # of the words
_SIMILAR_WITH_TOOLS: Final = 0.5
_MAX_ARGUMENTS: Final = 2**18  # characters of a call's arguments that are read
_MAX_STRINGS: Final = 64  # of a call's arguments
_PROMPTS: Final = 16  # with cached words: the words of a thousand long prompts would take a gigabyte
_ENDS: Final = 16  # messages, and parts of a message, that are read at the beginning and at the end of many


class System:
    """A system prompt. `key` is equal for prompts that differ in digits only, as in dates and times."""

    __slots__ = ("_words_of", "key", "text")

    def __init__(self, text: str, words_of: Callable[[str], frozenset[str]] | None = None) -> None:
        self.text = text
        self._words_of = words_of or _words_of
        self.key = blake2b(_without_digits(text), digest_size=16).digest()

    @property
    def words(self) -> frozenset[str]:
        """The different words."""
        return self._words_of(self.text)

    def resembles(self, other: "System", *, share_tools: bool) -> bool:
        """Return whether the two may be states of one prompt."""
        if self.key == other.key:
            return True
        words, others = self.words, other.words
        most = max(len(words), len(others))
        return len(words & others) >= most * (_SIMILAR_WITH_TOOLS if share_tools else _SIMILAR)


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A step as a part of a conversation."""

    step: Step
    agent: str | None  # which the client named
    system: System
    tools: frozenset[str]
    messages: list[Any]
    start: int  # the number of messages of the system prompt
    first: int  # the number of messages after these, before the first reply
    digest: bytes  # of these `first` messages

    @property
    def length(self) -> int:
        """The number of messages after the system prompt."""
        return len(self.messages) - self.start

    def message(self, at: int) -> Any:
        """Return the message with this index after the system prompt."""
        return self.messages[self.start + at]

    @property
    def step_id(self) -> str:
        """The ID of the step, which sorts by time."""
        return self.step.step_id

    @property
    def model(self) -> str | None:
        """The model that the client named."""
        return self.step.model_asked or self.step.model_served

    def parts(self) -> Iterator[str]:
        """Yield the texts of the user messages before the first reply; of many messages, only the first and last are read."""
        for at in _ends(range(self.start, self.start + self.first)):
            if role_of(self.messages[at]) == "user":
                yield from _parts(self.messages[at])

    def imported(self) -> Iterator[str]:
        """Yield the texts of the messages with which the conversation begins: of users, and the first reply."""
        yield from self.parts()
        if self.first < self.length:
            yield from _parts(self.message(self.first))


@dataclass(slots=True)
class Openings:
    """Reads the openings of the steps of one rollout. Each different message and system prompt is read once."""

    digests: Digests = field(default_factory=Digests)
    _systems: dict[bytes, System] = field(default_factory=dict)
    _words_of: Callable[[str], frozenset[str]] = field(default_factory=lambda: lru_cache(maxsize=_PROMPTS)(_words_of))
    # The messages of the newest step of each conversation, and the index of the last one of a user.
    _users: dict[bytes, tuple[list[Any], int | None]] = field(default_factory=dict)
    _before: tuple[list[Any], blake2b] = field(default_factory=lambda: ([], _hashed()))  # of the step before

    def read(self, step: Step) -> Opening:
        """Return the opening of a step, which needs its request."""
        messages = messages_of(step) if step.is_chat else []
        start = next(
            (at for at, message in enumerate(messages) if role_of(message) not in _INSTRUCTIONS), len(messages)
        )
        first, digest = self._beginning(messages, start)
        key = b"".join(map(self.digests.of, messages[:start]))
        if key not in self._systems:
            self._systems[key] = System("\n".join(map(text_of, messages[:start])), self._words_of)
        return Opening(
            step, agent_of(step.extra, step.request), self._systems[key], _tools(step), messages, start, first, digest
        )

    def user(self, opening: Opening) -> str:
        """Return the text of the last user message. What the step before of its conversation has is not searched again."""
        before, found = self._users.get(opening.digest, ([], None))
        messages = opening.messages
        begun = len(before) if messages[: len(before)] == before else 0
        users = (at for at in range(len(messages) - 1, begun - 1, -1) if role_of(messages[at]) == "user")
        found = next(users, found if begun else None)
        self._users[opening.digest] = messages, found
        return "" if found is None else text_of(messages[found])

    def _beginning(self, messages: list[Any], start: int) -> tuple[int, bytes]:
        """Return the number of messages before the first reply, and a digest of them.

        The first messages that the step before sent too are not read again: an agent may send a long history without replies.
        """
        before, hashed = self._before
        if messages[start : start + len(before)] != before:
            before, hashed = [], _hashed()
        begun = start + len(before)
        end = next((at for at in range(begun, len(messages)) if role_of(messages[at]) == "assistant"), len(messages))
        hashed = hashed.copy()
        hashed.update(b"".join(map(self.digests.of, messages[begun:end])))
        self._before = messages[start:end], hashed
        return end - start, hashed.digest()


def works_in_turns(openings: Sequence[Opening], digests: Digests) -> bool:
    """Return whether steps have tools, or are a conversation of several turns.

    A turn has the last message of an earlier one at the same place, or its reply behind it. Questions that an agent adds to
    the states of a history have neither.
    """
    if any(opening.tools for opening in openings):
        return True
    ends: defaultdict[bytes, defaultdict[int, set[bytes]]] = defaultdict(partial(defaultdict, set))
    for opening in openings:
        if opening.length:
            last = (opening.messages[-1], *replies_of(opening.step).values())
            ends[opening.digest][opening.length].update(map(digests.of, last))
    shorter = {digest: dict(pairwise(sorted(by_length, reverse=True))) for digest, by_length in ends.items()}
    for opening in openings:
        length = shorter.get(opening.digest, {}).get(opening.length)
        if length is None:
            continue
        found = {digests.of(opening.message(length - 1)), digests.of(opening.message(length))}
        if found & ends[opening.digest][length]:
            return True
    return False


def called_with(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each called tool with each text in its arguments."""
    for call in calls_of(message):
        function = call.get("function")
        if not isinstance(function, dict):
            continue
        arguments, name = function.get("arguments"), function.get("name")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments) if len(arguments) <= _MAX_ARGUMENTS else None
            except orjson.JSONDecodeError:
                continue
        for text in texts_in(arguments):
            yield name if isinstance(name, str) else "", text


def texts_in(value: Any) -> list[str]:
    """Return the texts of a JSON value, the outer ones first, and not more than are compared."""
    found, values = [], [value]
    for each in values:  # it grows meanwhile
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict | list):
            values += list(each.values() if isinstance(each, dict) else each)[: max(0, _MAX_STRINGS - len(values))]
    return found


def _words_of(text: str) -> frozenset[str]:
    return frozenset(_without_digits(text).decode().split())


def _without_digits(text: str) -> bytes:
    return text.encode(errors="replace").translate(None, _DIGITS)  # a hundred times as fast as `str.translate`


def _hashed() -> blake2b:
    return blake2b(digest_size=16)


def _ends(values: Sequence[T]) -> Sequence[T]:
    """Return the values; of many, the first and the last ones."""
    return values if len(values) <= 2 * _ENDS else [*values[:_ENDS], *values[-_ENDS:]]


def _parts(message: Any) -> Iterator[str]:
    content = message.get("content") if isinstance(message, dict) else message
    for part in _ends(content) if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and (stripped := text.strip()):
            yield stripped


def _tools(step: Step) -> frozenset[str]:
    tools, names = step.body.get("tools"), set()
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            names.add(name)
    return frozenset(names)
