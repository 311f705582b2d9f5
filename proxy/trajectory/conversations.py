"""The one index of a rollout's replies: `follow(messages)` finds the recorded replies that a list of messages continues.

Several recorded replies can have the same messages before them, the same text and the same calls. What distinguishes them, in
this order: IDs that the engine or TokenTape made and the agent repeats; reasoning that is sent back; what samples the call;
unchanged text; the agent; the later messages; delivery. Nothing is guessed: what remains is returned.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from proxy.trajectory.conversation import (
    NewestMessages,
    bare,
    canonical_calls,
    raw_calls,
    split_thoughts,
    text_of,
    thoughts_sent,
)

Message: TypeAlias = Mapping[str, Any]
Place: TypeAlias = tuple[int, bytes]


class Reply(Protocol):
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


T = TypeVar("T", bound=Reply)


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

    def may_contain(self, reply: Reply) -> bool:
        """Return whether the messages repeat no name or reasoning that differs from a reply or from one before it."""
        path: list[Reply] = []
        before: Reply | None = reply
        while before is not None and id(before) not in self._contained:
            path.append(before)
            before = before.parent
        result = before is None or self._contained[id(before)]
        for each in reversed(path):
            result = self._contained[id(each)] = result and self._repeats(each)
        return result

    def _repeats(self, reply: Reply) -> bool:
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
