"""What distinguishes the conversations of a rollout: model, system prompt, tools and first messages of their steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

import orjson

from proxy.trajectory.conversation import Digests, text_of
from proxy.trajectory.step import Step, answers_of, messages_of

_INSTRUCTIONS: Final = ("system", "developer")
_DIGITS: Final = {ord(digit): None for digit in "0123456789"}
_SIMILAR: Final = 0.8  # of the words
_SIMILAR_WITH_TOOLS: Final = 0.5
_MAX_ARGUMENTS: Final = 2**18  # characters of a call's arguments that are read
_MAX_STRINGS: Final = 64  # of a call's arguments


class System:
    """A system prompt. `key` is equal for prompts that differ in digits only, as in dates and times."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.key = blake2b(text.translate(_DIGITS).encode(errors="replace"), digest_size=16).digest()

    @cached_property
    def words(self) -> frozenset[str]:
        """The different words."""
        return frozenset(self.text.translate(_DIGITS).split())

    def resembles(self, other: "System", *, share_tools: bool) -> bool:
        """Return whether the two may be states of one prompt."""
        if self.key == other.key:
            return True
        most = max(len(self.words), len(other.words))
        return len(self.words & other.words) >= most * (_SIMILAR_WITH_TOOLS if share_tools else _SIMILAR)


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A step as a part of a conversation.

    `messages` are those after the system prompt, `first` the number of them before the first reply, `digest` a digest of these.
    `agent` is the one that the client named.
    """

    step: Step
    system: System
    tools: frozenset[str]
    messages: list[Any]
    first: int
    digest: bytes

    @property
    def step_id(self) -> str:
        """The ID of the step, which sorts by time."""
        return self.step.step_id

    @property
    def agent(self) -> str | None:
        """The agent that the client named."""
        agent = self.step.extra.get("agent")
        return agent if isinstance(agent, str) and agent else None

    @property
    def model(self) -> str | None:
        """The model that the client named."""
        return self.step.model_asked or self.step.model_served

    @property
    def user(self) -> str:
        """The text of the last user message."""
        users = (message for message in reversed(self.messages) if _role(message) == "user")
        return text_of(next(users, {}))

    def parts(self) -> Iterator[str]:
        """Yield the texts of the user messages before the first reply."""
        for message in self.messages[: self.first]:
            if _role(message) == "user":
                yield from _parts(message)

    def imported(self) -> Iterator[str]:
        """Yield the texts of the messages with which the conversation begins: of users, and the first reply."""
        yield from self.parts()
        for message in self.messages[self.first : self.first + 1]:
            yield from _parts(message)


@dataclass(slots=True)
class Openings:
    """Reads the openings of the steps of one rollout. Each different message and system prompt is read once."""

    digests: Digests = field(default_factory=Digests)
    _systems: dict[bytes, System] = field(default_factory=dict)

    def read(self, step: Step) -> Opening:
        """Return the opening of a step, which needs its request."""
        messages = messages_of(step) if step.is_chat else []
        start = next((at for at, message in enumerate(messages) if _role(message) not in _INSTRUCTIONS), len(messages))
        rest = messages[start:]
        first = next((at for at, message in enumerate(rest) if _role(message) == "assistant"), len(rest))
        key = b"".join(map(self.digests.of, messages[:start]))
        if key not in self._systems:
            self._systems[key] = System("\n".join(map(text_of, messages[:start])))
        digest = blake2b(b"".join(map(self.digests.of, rest[:first])), digest_size=16).digest()
        return Opening(step, self._systems[key], _tools(step), rest, first, digest)


def replies_of(step: Step) -> Iterator[dict[str, Any]]:
    """Yield the messages that were sampled in a step."""
    for answer in answers_of(step).values():
        message = answer.get("message")
        if isinstance(message, dict):
            yield message


def called_with(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each called tool with each text in its arguments."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments, name = function.get("arguments"), function.get("name")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments) if len(arguments) <= _MAX_ARGUMENTS else None
            except orjson.JSONDecodeError:
                continue
        for text in _strings(arguments):
            yield name if isinstance(name, str) else "", text


def _strings(value: Any) -> list[str]:
    """Return the texts of a JSON value, the outer ones first, and not more than are compared."""
    found, values = [], [value]
    for each in values:  # it grows meanwhile
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict | list):
            values += list(each.values() if isinstance(each, dict) else each)[: max(0, _MAX_STRINGS - len(values))]
    return found


def _parts(message: Any) -> Iterator[str]:
    content = message.get("content") if isinstance(message, dict) else message
    for part in content if isinstance(content, list) else [content]:
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


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
