"""Drift: the messages of a step continue an earlier step, but its prompt ids do not.

The result is a report. Whether steps join is decided by the tree, from ids only. Texts are inputs: they are requested
after the boundaries are found, or were stored with the step.

The messages of a step continue an earlier step of its policy if they begin with the earlier step's messages and reply. The
agent may have changed the reply, or one message without changing the role. If the agent dropped the reply, the step continues
what came before the reply: it is another branch, and not drift.

Windows that depend on texts are found early, when a step is stored (`Endings`), so that the texts can be requested while the
engine is available. Only the common case is found then: the messages repeat the reply unchanged at its position, and the ids
differ within it or before it. A step costs a digest of its reply and a comparison of its sampled ids, however long its rollout
is. `find_boundaries` decides later, over the whole rollout, which steps drifted, and finds the drift that was missed.

Bytes that are not a whole character decode to U+FFFD: where a window cuts a character, and where a sampled token was never
completed. They are omitted from every comparison of texts, because engines show, drop or re-encode them.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any, Final, Literal

from proxy.trajectory.arrays import Ids, Prompt, to_little_endian
from proxy.trajectory.blocks import count_equal
from proxy.trajectory.conversations import (
    Change,
    Digests,
    Replies,
    Reply,
    bare,
    calls_tools,
    replies_of,
    role_of,
    text_of,
    thinks,
    thoughts_of,
)
from proxy.trajectory.step import Step, messages_of
from proxy.trajectory.tree import Node, Tree

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
Texts = Literal["ok", "unavailable", "timeout", "over_limit", "not_requested"]
AROUND: Final = 8  # ids shown on either side of the boundary
OPENING: Final = 8  # ids before a reply, which may start its reasoning or be tokenized together with its first ids
_LOOKED_BACK: Final = 4  # replies that are searched for one that differs in one message
_COMPARED: Final = 64  # the youngest replies to the same messages, which a changed one is compared with


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


@dataclass(frozen=True, slots=True)
class Window:
    """The ids around a boundary, from position `start` on. They differ from position `index`."""

    engine: str  # of the earlier node
    index: int
    start: int
    expected_ids: tuple[int, ...]  # of the earlier node
    found_ids: tuple[int, ...]  # of the later prompt

    @property
    def key(self) -> str:
        """A key of what its texts depend on: the engine and the ids."""
        ids = b"".join(to_little_endian(array("i", ids)) for ids in (self.expected_ids, self.found_ids))
        return blake2b(ids + bytes([len(self.expected_ids)]) + self.engine.encode(), digest_size=16).hexdigest()

    @property
    def is_cut_off(self) -> bool:
        """Whether the later prompt ends at the boundary: it lacks tokens of the earlier node, and no text differs."""
        return self.start + len(self.found_ids) == self.index


@dataclass(frozen=True, slots=True)
class Boundary:
    """The position where a step's prompt differs from the ids of an earlier node that its messages continue."""

    step_id: str
    earlier: Node
    window: Window
    changed: Change | None  # what the agent changed in the messages
    reply: Any  # the message of the turn in which the ids differ, or before which they do
    sent_back: Any  # the message that the step has in its place
    in_reply: bool  # the ids differ within sampled ones
    opens_reply: bool  # they differ within the few ids before those

    @property
    def known(self) -> Kind | None:
        """The kind, if ids and messages determine it; None if it depends on the texts."""
        differs = self.in_reply or self.opens_reply
        if differs and self.changed in {None, "whitespace"} and thinks(self.reply) and not thinks(self.sent_back):
            return "reasoning_stripped"
        if self.changed is not None:
            return self.changed
        if not differs:
            return "template"
        return "template" if self.window.is_cut_off else None

    def kind(self, expected: str | None, found: str | None) -> Kind:
        """Return why the ids differ, by the texts around the boundary; `unexplained` if needed texts are missing."""
        if self.known is not None:
            return self.known
        if expected is None or found is None:
            return "unexplained"
        return kind_by_texts(self.reply, expected, found, in_reply=self.in_reply, may_lose_thoughts=thinks(self.reply))


@dataclass(frozen=True, slots=True)
class Drift:
    """An explained boundary. The kind is `unexplained` if it depends on missing texts."""

    step_id: str
    earlier_step_id: str
    earlier_choice: int
    index: int  # the first differing position in the full ids
    around_from: int  # the position of the first of these ids
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    expected_text: str | None = None
    found_text: str | None = None
    # `ok` if both texts are known, else the reason: neither a tokenizer nor the engine has them (`unavailable`), the time
    # limit passed (`timeout`), too many boundaries came before (`over_limit`), or they were not requested.
    texts: Texts = "unavailable"
    kind: Kind = "unexplained"


def find_boundaries(tree: Tree) -> list[Boundary]:
    """Return every boundary of a tree, the oldest first. Steps need their requests and responses."""
    memories: defaultdict[str, _Memory] = defaultdict(partial(_Memory, tree))  # one for each policy
    found: list[Boundary] = []
    seen: set[str] = set()
    for node in tree.nodes:
        if not node.step.is_chat or node.step.step_id in seen:
            continue
        seen.add(node.step.step_id)
        memory, messages = memories[node.step.policy], messages_of(node.step)
        earlier, changed = memory.earlier(messages)
        if earlier and not _begins_with_one(tree, node, earlier):
            found.append(_boundary(tree, node, next(iter(earlier.values())), changed, messages))
        replies = replies_of(node.step)
        nodes = [each for each in tree.nodes_of(node.step) if each.choice.index in replies]
        memory.add(messages, [(replies[each.choice.index], each) for each in nodes])
    return found


def _begins_with_one(tree: Tree, node: Node, earlier: Mapping[int, Node]) -> bool:
    """Return whether the prompt of a node begins with the full ids of one of these nodes; their keys are `Tree.same`."""
    shortest = min(other.end for other in earlier.values())
    longer = takewhile(lambda position: tree.nodes[position].end >= shortest, tree.beginnings(node))
    return any(position in earlier for position in longer)


def explain(
    boundary: Boundary,
    expected_text: str | None = None,
    found_text: str | None = None,
    *,
    missing: Texts = "unavailable",
) -> Drift:
    """Return the boundary with its kind, by the texts of its ids; `missing` is the reason if there are none."""
    window = boundary.window
    return Drift(
        step_id=boundary.step_id,
        earlier_step_id=boundary.earlier.step.step_id,
        earlier_choice=boundary.earlier.choice.index,
        index=window.index,
        around_from=window.start,
        expected_ids=window.expected_ids,
        found_ids=window.found_ids,
        expected_text=expected_text,
        found_text=found_text,
        texts=missing if expected_text is None or found_text is None else "ok",
        kind=boundary.kind(expected_text, found_text),
    )


class _Memory:
    """The conversations of earlier steps of one policy. Of nodes with the same full ids (`Tree.same`) the oldest is kept."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._digests = Digests()
        self._replies = Replies[tuple[int, Reply, Node]]()  # all of a place have the key None as well
        self._known: set[tuple[bytes, bytes | None, int]] = set()
        self._recent: deque[tuple[list[Any], Node]] = deque(maxlen=_LOOKED_BACK)

    def earlier(self, messages: list[Any]) -> tuple[Mapping[int, Node], Change | None]:
        """Return the nodes that messages continue, by `Tree.same`, and what was changed in them; {} if there are none.

        A later reply that was changed is a longer match than an earlier one that was not.
        """
        chain = self._digests.chain(messages)
        for before, replies in self._replies.follow(chain[:-1]):
            message = messages[before + 1]
            if equal := replies.get(self._digests.of(message)):
                return {same: node for same, _, node in equal}, None
            if role_of(message) == "assistant":
                youngest = islice(reversed(replies[None]), _COMPARED)
                changes = [(reply.change(message), same, node) for same, reply, node in youngest][::-1]
                unchanged = {same: node for changed, same, node in changes if changed is None}
                changed, same, node = min(changes, key=lambda change: change[0] == "edited")
                return (unchanged, None) if unchanged else ({same: node}, changed)
        apart = self._one_message_apart(messages) if chain else None
        return ({self._tree.same(apart): apart}, "edited") if apart is not None else ({}, None)

    def add(self, messages: list[Any], replies: Sequence[tuple[Any, Node]]) -> None:
        chain = self._digests.chain(messages)
        if not chain:
            return
        for message, node in replies:
            same, reply = self._tree.same(node), Reply(message)
            for key in (self._digests.of(message), None):
                if (chain[-1], key, same) not in self._known:
                    self._known.add((chain[-1], key, same))
                    self._replies.add(chain[-1], key, (same, reply, node))
        for message, node in replies[-_LOOKED_BACK:]:
            self._recent.append(([*messages, message], node))

    def _one_message_apart(self, messages: list[Any]) -> Node | None:
        """Return the youngest node that the messages repeat except for one message of the same role; two or more are equal."""
        node: Node
        for before, node in reversed(self._recent):
            if 2 < len(before) <= len(messages):
                pairs = zip(before, messages, strict=False)
                different = (pair for pair in pairs if self._digests.of(pair[0]) != self._digests.of(pair[1]))
                apart = list(islice(different, 2))
                if len(apart) == 1 and role_of(apart[0][0]) == role_of(apart[0][1]):
                    return node
        return None


def _boundary(tree: Tree, node: Node, before: Node, changed: Change | None, messages: list[Any]) -> Boundary:
    prompt = node.prompt[:]
    end = len(prompt) + AROUND  # a thousand short prompts may differ from one long reply
    full = before.prompt[:end] + before.choice.ids[: max(0, end - len(before.prompt))]
    index = count_equal(full, prompt)
    turn = before
    while turn.parent is not None and index < tree.nodes[turn.parent].end:
        turn = tree.nodes[turn.parent]
    position = len(messages_of(turn.step))
    return Boundary(
        step_id=node.step.step_id,
        earlier=before,
        window=window_at(before.step.engine.name, full, prompt, index),
        changed=changed,
        reply=replies_of(turn.step).get(turn.choice.index),
        sent_back=messages[position] if position < len(messages) else None,
        in_reply=turn.start <= index,
        opens_reply=turn.start - OPENING <= index < turn.start,
    )


def window_at(engine: str, full: Ids, prompt: Ids, index: int, offset: int = 0) -> Window:
    """Return the window around the index at which two lists of ids differ. Both lists start at position `offset`."""
    start = max(index - AROUND, 0)
    ends = slice(start - offset, index + AROUND - offset)
    return Window(engine, index, start, tuple(full[ends]), tuple(prompt[ends]))


_ENDING_BYTES: Final = 1000  # an estimate: of one ending without its ids
_MAX_PER_POLICY: Final = 16
_LONGEST: Final = 2**18  # characters of a reply: their digest takes half a millisecond; longer ones are not remembered
_BEFORE: Final = OPENING + AROUND  # ids of the prompt that a window may contain


@dataclass(frozen=True, slots=True)
class _Ending:
    """How one choice ended."""

    engine: str
    position: int  # of the reply in later messages
    size: tuple[int, int]  # of the reply
    reply: bytes  # its digest
    has_thoughts: bool
    offset: int  # the position of the first of these ids
    ids: Ids  # the last ones of the prompt and all sampled ones

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)


class Endings:
    """The endings of the latest steps of one rollout by policy. `size`: their approximate memory in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._of: dict[str, deque[_Ending]] = {}

    def __repr__(self) -> str:
        return f"<Endings of {len(self._of)} policies, {self.size} bytes>"

    def add(self, step: Step) -> Window | None:
        """Add the ending of a step.

        Return the window around the position where its prompt differs from the step that it continues, if they differ
        and the kind may depend on the texts of the window.
        """
        if not step.is_chat or not step.choices or not step.prompts:
            return None
        messages = messages_of(step)
        window = _window(self._of.get(step.policy, ()), messages, step)
        if endings := _endings_of(step, len(messages)):
            known = self._of.setdefault(step.policy, deque())
            known += endings
            self.size += sum(map(_bytes, endings))
            while len(known) > _MAX_PER_POLICY:
                self.size -= _bytes(known.popleft())
        return window


def _window(known: Sequence[_Ending], messages: list[Any], step: Step) -> Window | None:
    prompt = step.prompts[0]
    if not known or _follows(known[-1], messages, prompt):
        return None
    nearest = _continued(known, messages)
    if not nearest:
        return None
    if any(prompt[ending.offset : ending.end] == ending.ids for ending in nearest):
        return None
    ending = nearest[0]
    index = ending.offset + count_equal(ending.ids, prompt[ending.offset : ending.end])
    may_show = index - AROUND >= ending.offset or ending.offset == 0
    if not may_show or (ending.has_thoughts and not thinks(messages[ending.position])):
        return None
    window = window_at(ending.engine, ending.ids, prompt[ending.offset : index + AROUND], index, ending.offset)
    return None if window.is_cut_off else window


def _follows(newest: _Ending, messages: list[Any], prompt: Prompt) -> bool:
    """Return whether a prompt continues the ids of the newest ending, and its messages have no later reply."""
    later = messages[newest.position + 1 :]
    has_reply = any(role_of(message) == "assistant" for message in later)
    return prompt[newest.offset : newest.end] == newest.ids and not has_reply


def _continued(known: Collection[_Ending], messages: list[Any]) -> list[_Ending]:
    """Find the last message that repeats a reply at its position; return all endings with this reply there."""
    digests = Digests()
    for position in sorted({ending.position for ending in known if ending.position < len(messages)}, reverse=True):
        size = _size(messages[position])
        alike = [ending for ending in known if ending.position == position and ending.size == size]
        if not alike:  # an agent's message can have many megabytes, and needs no digest
            continue
        reply = digests.of(messages[position])
        if found := [ending for ending in alike if ending.reply == reply]:
            return found
    return []


def _endings_of(step: Step, position: int) -> list[_Ending]:
    digests, replies, found = Digests(), replies_of(step), []
    for choice in step.choices[:_MAX_PER_POLICY]:
        message = replies.get(choice.index)
        if message is None or choice.prompt or not choice.ids:
            continue
        prompt = step.prompts[0]
        offset = max(len(prompt) - _BEFORE, 0)
        ids = prompt[offset:] + choice.ids
        size = _size(message)
        if size[0] < 0 or sum(size) > _LONGEST:
            continue
        found.append(_Ending(step.engine.name, position, size, digests.of(message), thinks(message), offset, ids))
    return found


def _size(message: Any) -> tuple[int, int]:
    """Return the lengths of a message's content and of the arguments of its calls.

    They are equal for equal messages.
    """
    if not isinstance(message, dict):
        return -1, 0
    content, calls = message.get("content") or "", message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return (
        len(content) if isinstance(content, str) else -1,
        sum(len(text) for text in arguments if isinstance(text, str)),
    )


def _bytes(ending: _Ending) -> int:
    return len(ending.ids) * ending.ids.itemsize + _ENDING_BYTES
