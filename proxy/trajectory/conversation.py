"""Comparison of message lists by what agents send back.

Messages are compared by role, content, and the names and arguments of tool calls. What engines add to a reply (nulls,
refusal, reasoning, ids of calls) and agents commonly omit is no difference.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, Literal

import orjson

from proxy.trajectory.blocks import count_equal

Change = Literal["reasoning_stripped", "tool_call_rewritten", "whitespace", "edited"]

_LONG_BYTES: Final = 2**16
_BYTES_PER_MESSAGE: Final = 100  # an estimate: the objects of a message and of its digest
_THOUGHTS = re.compile(r"^.*?</think>", re.DOTALL)


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
        links = links.copy() if messages[: len(before)] == before else []
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
    """The newest long list of messages: the messages that the next list begins with are compared, and not digested again.

    `size` is the approximate memory in bytes.
    """

    __slots__ = ("_essences", "_links", "size")

    def __init__(self) -> None:
        self._essences: list[bytes] = []
        self._links: list[bytes] = []
        self.size = 0

    def forget(self) -> None:
        """Drop the messages."""
        self._essences, self._links, self.size = [], [], 0

    def chain(self, messages: list[Any]) -> list[bytes]:
        """Return the digest of each prefix of the list, as `Digests.chain`."""
        essences = list(map(_essence, messages))
        links = self._links[: count_equal(self._essences, essences)]
        for essence in essences[len(links) :]:
            digest = blake2b(essence, digest_size=16).digest()
            links.append(blake2b((links[-1] if links else b"") + digest, digest_size=16).digest())
        size = sum(map(len, essences))
        if size >= _LONG_BYTES:
            self._essences, self._links, self.size = essences, links, size + _BYTES_PER_MESSAGE * len(links)
        return links


def _essence(message: Any) -> bytes:
    """Return the compared parts of a message as JSON.

    Each part is written separately: nested in another value, a message of the maximum depth would be too deep for
    orjson.
    """
    if not isinstance(message, dict):
        return orjson.dumps(message)
    parts = [message.get("role"), message.get("content") or "", _calls(message), message.get("tool_call_id")]
    return b"\n".join(map(orjson.dumps, parts))


def _calls(message: Mapping[str, Any]) -> list[list[Any]]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    functions = [call.get("function") or {} for call in calls if isinstance(call, dict)]
    return [[function.get("name"), function.get("arguments")] for function in functions if isinstance(function, dict)]


def thinks(message: Any) -> bool:
    """Return whether a reply has reasoning, in a separate field or in its text."""
    if not isinstance(message, dict):
        return False
    return bool(message.get("reasoning") or message.get("reasoning_content")) or "</think>" in text_of(message)


def thoughts_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning in the separate field of a reply."""
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    return thoughts if isinstance(thoughts, str) else ""


def calls_tools(message: Any) -> bool:
    """Return whether a reply calls tools."""
    return isinstance(message, dict) and bool(_calls(message))


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


def change(reply: Any, sent_back: Any) -> Change | None:
    """Return what an agent changed in a reply before it sent it back; None if nothing, or if the two cannot be compared."""
    if not isinstance(reply, dict) or not isinstance(sent_back, dict):
        return None
    ours, theirs = text_of(reply), text_of(sent_back)
    if _calls(reply) != _calls(sent_back):
        same = _read(_calls(reply)) == _read(_calls(sent_back))
        return "tool_call_rewritten" if same and bare(ours) == bare(theirs) else "edited"
    if ours == theirs:
        return None
    without_thoughts = _THOUGHTS.sub("", ours)
    if without_thoughts != ours and bare(without_thoughts) == bare(theirs):
        return "reasoning_stripped"
    return "whitespace" if bare(ours) == bare(theirs) else "edited"


def _read(calls: list[list[Any]]) -> list[list[Any]]:
    """Return the calls with parsed arguments."""
    read = []
    for name, arguments in calls:
        try:
            read.append([name, orjson.loads(arguments) if isinstance(arguments, str) else arguments])
        except orjson.JSONDecodeError:
            read.append([name, arguments])
    return read
