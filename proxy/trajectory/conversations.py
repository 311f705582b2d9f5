"""Which recorded reply does a list of messages continue? The index that answers it, and the comparison of messages.

`Replies.follow` finds the replies that messages repeat. Its users differ in what the place of a reply is, and in which
replies are equal:

| user | a place | equal replies |
|---|---|---|
| continuation (`continuation/turns.py`) | all messages before | text without whitespace around it, calls as JSON |
| drift | all messages before | `Digests.of`; else replies there that the agent changed |
| families of threads | a conversation, an index and the message before | `Digests.of` |
| ATIF (`export.atif`) | all messages before | IDs of calls, or else text without whitespace around it |

Messages are compared by role, content, name, and the names and arguments of tool calls. What engines add to a reply (nulls,
refusal, reasoning, ids of calls) and agents commonly omit is no difference, nor is the name that agents give to a reply.
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from operator import is_
from typing import Any, Final, Generic, Literal, TypeVar

import orjson

from proxy.trajectory.blocks import count_equal
from proxy.trajectory.json_bytes import parse_text, write_python
from proxy.trajectory.step import Step, answers_of

T = TypeVar("T")

Change = Literal["reasoning_stripped", "tool_call_rewritten", "whitespace", "edited"]

# The field of a message with its reasoning: vLLM 0.32 has the first, SGLang 0.5.23 and llama.cpp the second. An engine with
# both repeats the same text.
THOUGHTS: Final = ("reasoning", "reasoning_content")
_BYTES_PER_MESSAGE: Final = 100  # an estimate: the objects of a message and of its digest
_JOINT: Final = "\n"  # between text parts (vLLM 0.32, renderers/chat_utils.py)
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # for integers of any size
_END_OF_THOUGHTS: Final = "</think>"
_LONG_NUMBER: Final = re.compile(r"[0-9]{16}")  # orjson reads integers beyond 64 bits as floats, with fewer digits
_NO_REPLIES: Final[Mapping[Hashable, Any]] = {}


class Replies(Generic[T]):
    """Recorded replies by their place and by a key that is equal for equal replies, the oldest first."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[Hashable, dict[Hashable, list[T]]] = {}

    def add(self, place: Hashable, key: Hashable, reply: T) -> None:
        """Add a reply; it may have several keys."""
        self._at.setdefault(place, {}).setdefault(key, []).append(reply)

    def at(self, place: Hashable) -> Mapping[Hashable, Sequence[T]]:
        """Return the replies of a place by their keys."""
        return self._at.get(place, _NO_REPLIES)

    def follow(self, places: Sequence[Hashable]) -> Iterator[tuple[int, Mapping[Hashable, Sequence[T]]]]:
        """Yield the index of each place that has replies, the last one first, and its replies by their keys."""
        for position in range(len(places) - 1, -1, -1):
            replies = self._at.get(places[position])
            if replies is not None:
                yield position, replies


class Digests:
    """Digests of message lists, by the last message and all before it. Each parsed message is digested once."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, bytes]] = {}  # by id(): the messages of one rollout's steps are shared objects
        self._before: tuple[list[Any], list[bytes]] = ([], [])

    def chain(self, messages: Any) -> list[bytes]:
        """Return the digest of each prefix of the list, the shortest first."""
        if not isinstance(messages, list):
            return []
        before, links = self._before
        # Most lists continue the previous one. Comparing shared objects is cheap; digests would be quadratic in the turns.
        links = links.copy() if _begins_with(messages, before) else []
        for message in messages[len(links) :]:
            before_it = links[-1] if links else b""
            links.append(blake2b(before_it + self.of(message), digest_size=16).digest())
        self._before = (messages, links)
        return links

    def of(self, message: Any) -> bytes:
        """Return the digest of one message."""
        known = self._of.get(id(message))
        if known is None:
            known = self._of[id(message)] = (message, blake2b(_essence(message), digest_size=16).digest())
        return known[1]


class NewestMessages:
    """The newest list of messages: the messages that the next list begins with are compared as JSON, and not digested again."""

    __slots__ = ("_links", "_texts", "joint", "size")

    def __init__(self) -> None:
        self.joint = _JOINT  # what the engine writes between the text parts of a message
        self._texts: list[bytes] = []  # the joint, and the JSON of each message
        self._links: list[bytes] = []
        self.size = 0  # the approximate memory in bytes

    def chain(self, messages: list[Any]) -> list[bytes]:
        """Return the digest of each prefix of the list, as `Digests.chain`."""
        joint = self.joint
        try:
            # Copied: what orjson returns takes at least 4 kB.
            texts = [joint.encode(), *map(bytes, map(memoryview, map(orjson.dumps, messages)))]  # type: ignore[arg-type]
        except TypeError:  # a number or a depth that orjson does not write, in a field that may not be compared
            texts = [joint.encode(), *(_essence(message, joint) for message in messages)]
        links = self._links[: max(count_equal(self._texts, texts) - 1, 0)]
        for message in messages[len(links) :]:
            digest = blake2b(_essence(message, joint), digest_size=16).digest()
            links.append(blake2b((links[-1] if links else b"") + digest, digest_size=16).digest())
        self._texts, self._links = texts, links
        self.size = sum(map(len, texts)) + _BYTES_PER_MESSAGE * len(links)
        return links


def _essence(message: Any, joint: str = _JOINT) -> bytes:
    """Return the compared parts of a message as JSON; text parts are compared as the text that the engine makes of them.

    Each part is written separately: nested in another value, a message of the maximum depth would be too deep for
    orjson.
    """
    if not isinstance(message, dict):
        return orjson.dumps(message)
    role = message.get("role")
    content = message.get("content") or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        content = joint.join(strings) if len(strings) == len(content) else content
    parts = [role, content, raw_calls(message), message.get("tool_call_id")]
    if role != "assistant" and message.get("name") is not None:
        parts.append(message["name"])
    return b"\n".join(map(orjson.dumps, parts))


def _begins_with(messages: list[Any], before: list[Any]) -> bool:
    """Return whether a list begins with other messages, which are mostly the same objects; 1, 1.0 and true differ."""
    if len(messages) < len(before) or all(map(is_, messages, before)):
        return len(messages) >= len(before)
    pairs = zip(messages, before, strict=False)
    return all(one is other or (one == other and _essence(one) == _essence(other)) for one, other in pairs)


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message that are objects."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def raw_calls(message: Mapping[str, Any]) -> list[list[Any]]:
    """Return the name and the arguments of each call of a message, including the deprecated `function_call`."""
    function = message.get("function_call")
    if not message.get("tool_calls") and function is None:
        return []
    found = [call.get("function") or {} for call in calls_of(message)]
    if function is not None:
        found.append(function)
    return [[function.get("name"), function.get("arguments")] for function in found if isinstance(function, dict)]


def canonical_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call as texts that are equal for equal JSON."""
    return [
        (name if isinstance(name, str) else canonical_json(name), canonical_json(arguments))
        for name, arguments in raw_calls(message)
    ]


def canonical_json(text: Any) -> str:
    """Return a text that is equal for equal JSON: of the value of a text that is JSON, else of the text or value itself.

    Spaces, escapes and the order of keys make no difference; 1, 1.0 and true do, and integers are compared digit by digit.
    """
    if not isinstance(text, str):
        return write_python(text, _CANONICAL)
    try:
        value = parse_text(text, json.loads if _LONG_NUMBER.search(text) else orjson.loads)  # noqa: TID251
        return write_python(value, _CANONICAL)
    except (ValueError, RecursionError):
        return text


def replies_of(step: Step) -> dict[int, dict[str, Any]]:
    """Return the messages that were sampled in a step, by the index of the choice."""
    answers = answers_of(step).items()
    return {index: message for index, answer in answers if isinstance(message := answer.get("message"), dict)}


def role_of(message: Any) -> Any:
    """Return the role of a message; None for what is no message."""
    return message.get("role") if isinstance(message, dict) else None


def thinks(message: Any) -> bool:
    """Return whether a reply has reasoning, in a separate field or in its text."""
    if not isinstance(message, dict):
        return False
    return bool(message.get("reasoning") or message.get("reasoning_content")) or _END_OF_THOUGHTS in text_of(message)


def thoughts_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning in the separate field of a reply."""
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    return thoughts if isinstance(thoughts, str) else ""


def thoughts_sent(message: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the reasoning in the fields of a message without its whitespace; None if it is no text."""
    values = [value for name in THOUGHTS if (value := message.get(name))]
    return frozenset(map(bare, values)) - {""} if all(isinstance(value, str) for value in values) else None


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of a text without its tags, and the rest; no reasoning if no tag ends it."""
    thoughts, found, rest = text.partition(_END_OF_THOUGHTS)
    return (thoughts.strip().removeprefix("<think>"), rest) if found else ("", text)


def calls_tools(message: Any) -> bool:
    """Return whether a reply calls tools."""
    return isinstance(message, dict) and bool(raw_calls(message))


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content, with its parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def bare(text: str) -> str:
    """Return a text without its whitespace."""
    return "".join(text.split())


class Reply:
    """A reply, with which the messages that agents send back are compared. It is read once for all of them."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._message = message

    @cached_property
    def _text(self) -> str:
        return text_of(self._message)

    @cached_property
    def _bare(self) -> str:
        return bare(self._text)

    @cached_property
    def _bare_answer(self) -> str | None:
        """Its text after the reasoning; None if it has none."""
        _, answer = split_thoughts(self._text)
        return None if answer == self._text else bare(answer)

    @cached_property
    def _calls(self) -> list[list[str]]:
        return _texts(self._message)

    @cached_property
    def _canonical_calls(self) -> list[tuple[str, str]]:
        return canonical_calls(self._message)

    def change(self, sent_back: Any) -> Change | None:
        """Return what an agent changed in it before it sent it back; None if nothing, or if the two cannot be compared."""
        if not isinstance(sent_back, dict):
            return None
        theirs = text_of(sent_back)
        if self._calls != _texts(sent_back):
            same = self._canonical_calls == canonical_calls(sent_back)
            return "tool_call_rewritten" if same and self._bare == bare(theirs) else "edited"
        if self._text == theirs:
            return None
        sent = bare(theirs)
        if self._bare_answer == sent:
            return "reasoning_stripped"
        return "whitespace" if self._bare == sent else "edited"


def _texts(message: Mapping[str, Any]) -> list[list[str]]:
    """Return the calls of a message as sampled texts: values that are no texts are compared as JSON."""
    return [[part if isinstance(part, str) else canonical_json(part) for part in call] for call in raw_calls(message)]
