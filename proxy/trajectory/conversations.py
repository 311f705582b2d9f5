"""The one index of a rollout's replies: `follow(messages)` finds the recorded replies that a list of messages continues.

Several recorded replies can have the same messages before them, the same text and the same calls. What distinguishes them, in
this order: IDs that the engine or TokenTape made and the agent repeats; reasoning that is sent back; what samples the call;
unchanged text; the agent; the later messages; delivery. Nothing is guessed: what remains is returned.

Messages are compared by role, content, name, and the names and arguments of tool calls. What engines add to a reply (nulls,
refusal, reasoning, ids of calls) and agents commonly omit is no difference, nor is the name that agents give to a reply.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from operator import is_
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import orjson

from proxy.trajectory.blocks import count_equal
from proxy.trajectory.json_bytes import parse_text, write_python

Change = Literal["reasoning_stripped", "tool_call_rewritten", "whitespace", "edited"]

_THOUGHTS: Final = ("reasoning", "reasoning_content")
_BYTES_PER_MESSAGE: Final = 100  # an estimate: the objects of a message and of its digest
_JOINT: Final = "\n"  # between text parts (vLLM 0.32, renderers/chat_utils.py)
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # for integers of any size
_END_OF_THOUGHTS: Final = "</think>"
_LONG_NUMBER: Final = re.compile(
    r"[0-9]{16}"
)  # a float64, as which orjson reads integers beyond 64 bits, has fewer exact digits


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
            links.append(self.link(links[-1] if links else b"", message))
        self._before = (messages, links)
        return links

    def link(self, before: bytes, message: Any) -> bytes:
        """Return the digest of a list that ends in this message."""
        return blake2b(before + self.of(message), digest_size=16).digest()

    def of(self, message: Any) -> bytes:
        """Return the digest of one message."""
        known = self._of.get(id(message))
        if known is None:
            known = self._of[id(message)] = (message, blake2b(_essence(message), digest_size=16).digest())
        return known[1]


class NewestMessages:
    """The newest list of messages: the messages that the next list begins with are compared as JSON, and not digested again.

    `size` is the approximate memory in bytes. `joint`: what the engine writes between the text parts of a message.
    """

    __slots__ = ("_links", "_texts", "joint", "size")

    def __init__(self) -> None:
        self.joint = _JOINT
        self._texts: list[bytes] = []  # the joint, and the JSON of each message
        self._links: list[bytes] = []
        self.size = 0

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


def raw_calls(message: Mapping[str, Any]) -> list[list[Any]]:
    """Return the name and the arguments of each call of a message, that of the deprecated `function_call` included."""
    calls, function = message.get("tool_calls"), message.get("function_call")
    if not calls and function is None:
        return []
    found = [call.get("function") or {} for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if function is not None:
        found.append(function)
    return [[function.get("name"), function.get("arguments")] for function in found if isinstance(function, dict)]


def canonical_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call as texts that are equal for equal JSON."""
    calls = raw_calls(message)
    if not calls:
        return []
    return [
        (name if isinstance(name, str) else canonical_json(name), canonical_json(arguments))
        for name, arguments in calls
    ]


def canonical_json(text: Any) -> str:
    """Return a text that is equal for equal JSON: of the value of a text that is JSON, else of the text or value itself.

    Spaces, escapes and the order of keys make no difference; 1, 1.0 and true do, and integers are compared digit by digit.
    """
    if not isinstance(text, str):
        return _canonical(text)
    try:
        return _canonical(parse_text(text, json.loads if _LONG_NUMBER.search(text) else orjson.loads))  # noqa: TID251
    except (ValueError, RecursionError):
        return text


def _canonical(value: Any) -> str:
    return write_python(value, _CANONICAL)


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
    values = [value for name in _THOUGHTS if (value := message.get(name))]
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


Message: TypeAlias = Mapping[str, Any]
Place: TypeAlias = tuple[int, bytes]


class RecordedReply(Protocol):
    """A recorded reply.

    `place`: the number of messages before it, and their digest. `reply`: the message as the engine returned it. `names`: the
    IDs of its response and of its calls. `parent`: the reply that its prompt contains as it was sampled.
    """

    step_id: str
    choice: int
    place: Place
    reply: Message
    names: frozenset[str]
    agent: str | None
    is_delivered: bool
    parent: Any


T = TypeVar("T", bound=RecordedReply)


@dataclass(frozen=True, slots=True)
class Followed(Generic[T]):
    """The recorded replies that the message at a position may be; none if only its reasoning or its IDs are of another."""

    position: int
    replies: Sequence[T]


@dataclass(frozen=True, slots=True)
class Caller(Generic[T]):
    """What is known of the agent that sends messages.

    `steps`: the steps whose responses it names by ID. `fits`: whether a reply may be continued by what samples the call.
    `drops_thoughts`: replies are equal without the `<think>` part of their text.
    """

    fits: Callable[[T], bool]
    agent: str | None = None
    steps: Collection[str] = ()
    drops_thoughts: bool = False


@dataclass(slots=True, eq=False)
class Conversations(Generic[T]):
    """The replies of one rollout. `newest`: the messages of the newest call."""

    newest: NewestMessages = field(default_factory=NewestMessages)
    _replies: dict[Place, dict[bytes, list[T]]] = field(default_factory=dict)  # by the digest of the reply
    _later: dict[tuple[str, int], list[T]] = field(default_factory=dict)  # by the step and choice that they follow
    _places: dict[str, Place] = field(default_factory=dict)  # by step
    _names: set[str] = field(default_factory=set)

    def place(self, messages: list[Any]) -> Place:
        """Return the place of a reply to these messages, of which there is at least one."""
        return len(messages), self.newest.chain(messages)[-1]

    def add(self, reply: T, follows: T | None = None) -> None:
        """Add a reply; its step continues the reply `follows`, by ids or not."""
        at = self._replies.setdefault(reply.place, {})
        text = text_of(reply.reply)
        key, (_, spoken) = _key(reply.reply, text), split_thoughts(text)
        at.setdefault(key, []).append(reply)
        if spoken != text and (other := _key(reply.reply, spoken)) != key:
            at.setdefault(other, []).append(reply)
        self._places[reply.step_id] = reply.place
        self._names.update(reply.names)
        if follows is not None:
            self._later.setdefault((follows.step_id, follows.choice), []).append(reply)

    def follow(self, messages: list[Any], caller: Caller[T]) -> Iterator[Followed[T]]:
        """Yield the replies that messages continue, after the most messages first."""
        chain = self.newest.chain(messages)
        sent = _Sent(messages, self._names)
        named: dict[Place | None, set[str]] = {}
        for step in caller.steps:
            named.setdefault(self._places.get(step), set()).add(step)
        for position in range(len(messages) - 1, 0, -1):
            place = position, chain[position - 1]
            if place not in self._replies or not _is_reply(messages[position]):
                continue
            message = messages[position]
            equal = self._replies[place].get(_key(message, text_of(message)), [])
            ranks = {id(reply): _rank(reply.reply, message) for reply in equal}
            equal = [reply for reply in equal if caller.drops_thoughts or ranks[id(reply)]]
            if equal:
                meant = [reply for reply in equal if place not in named or reply.step_id in named[place]]
                meant = [reply for reply in meant if sent.may_contain(reply)]
                yield Followed(position, self._nearest(meant, ranks, chain, caller))

    def _nearest(self, meant: list[T], ranks: Mapping[int, int], chain: Sequence[bytes], caller: Caller[T]) -> list[T]:
        """Return the replies that are nearest to what the caller sent."""
        for rank in (
            caller.fits,
            lambda reply: ranks[id(reply)],
            lambda reply: reply.agent == caller.agent,
            lambda reply: self._shared(reply, chain),
            lambda reply: reply.is_delivered,
        ):
            if len(meant) < 2:
                break
            ranked = [(rank(reply), reply) for reply in meant]
            best = max(value for value, _ in ranked)
            meant = [reply for value, reply in ranked if value == best]
        return meant

    def _shared(self, reply: T, chain: Sequence[bytes]) -> int:
        """Return the number of messages of the longest recorded call after a reply that these begin with; 0 for none."""
        longest, following = 0, list(self._later.get((reply.step_id, reply.choice), ()))
        while following:
            later = following.pop()
            length, digest = later.place
            if length <= len(chain) and chain[length - 1] == digest:
                longest = max(longest, length)
                following += self._later.get((later.step_id, later.choice), ())
        return longest


class _Sent:
    """The replies in the messages of a call, with the names and the reasoning that its agent repeats. Each is read once."""

    def __init__(self, messages: Sequence[Any], names: Collection[str]) -> None:
        self._messages = messages
        self._known = names
        self._read: dict[int, tuple[frozenset[str], frozenset[str] | None]] = {}
        self._contained: dict[int, bool] = {}  # by the id() of a reply

    def may_contain(self, reply: RecordedReply) -> bool:
        """Return whether the messages repeat no name or reasoning that differs from a reply or from one before it."""
        path: list[RecordedReply] = []
        before: RecordedReply | None = reply
        while before is not None and id(before) not in self._contained:
            path.append(before)
            before = before.parent
        result = before is None or self._contained[id(before)]
        for each in reversed(path):
            result = self._contained[id(each)] = result and self._repeats(each)
        return result

    def _repeats(self, reply: RecordedReply) -> bool:
        position = reply.place[0]
        if position not in self._read:
            message = self._messages[position]
            self._read[position] = _known_names(message, self._known), thoughts_sent(message)
        names, thoughts = self._read[position]
        if not names <= reply.names:
            return False
        if not thoughts:
            return thoughts is not None
        recorded = thoughts_sent(reply.reply) or frozenset((bare(split_thoughts(text_of(reply.reply))[0]),))
        return thoughts <= recorded


def _known_names(message: Message, known: Collection[str]) -> frozenset[str]:
    """Return the IDs in a message that are those of recorded responses and calls.

    A call without an ID of its own has one of its dialect: a prefix, the step ID and the index of the call.
    """
    calls = message.get("tool_calls")
    found = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    names = [name for name in (*found, message.get("id")) if isinstance(name, str)]
    both = (name if name in known else name.partition("_")[2] for name in names)
    return frozenset(name for name in both if name in known)


def _is_reply(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _key(message: Message, text: str) -> bytes:
    """Return a digest that is equal for replies with the same text, apart from whitespace around it, and the same calls."""
    parts = [text.strip()]
    for call in canonical_calls(message):
        parts += call
    digest = blake2b(digest_size=16)
    for part in parts:
        value = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(value) + value)
    return digest.digest()


def _rank(reply: Message, message: Message) -> int:
    """Return how a message repeats a reply: 2 unchanged, 1 formatted differently, 0 without the reasoning in its text."""
    ours, theirs = text_of(reply), text_of(message)
    if ours == theirs:
        return 2 if raw_calls(reply) == raw_calls(message) else 1
    return 1 if ours.strip() == theirs.strip() else 0
