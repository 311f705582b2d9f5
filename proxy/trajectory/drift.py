"""Drift: a step whose messages go on from an earlier step's, while its prompt ids do not.

Holds the finding of such boundaries, and their explanation. It reports and decides nothing: whether steps join is the
tree's, by ids alone. Text comes from outside: it is asked for once the boundaries are found.

A step goes on from an earlier one if its messages begin with that one's messages and reply; or with its messages and a
reply that the agent changed; or if they differ from them in one message alone.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from proxy.trajectory.answers import answers_of, messages_of
from proxy.trajectory.conversation import Change, Digests, calls_tools, change, thinks
from proxy.trajectory.step import Ids, Step
from proxy.trajectory.tree import Node, Tree

Kind = Literal[
    "reasoning_stripped", "tool_call_rewritten", "retokenized", "whitespace", "template", "edited", "other", "unexplained"
]  # fmt: skip
Texts = Literal["ok", "unavailable", "timeout", "over_limit", "not_requested"]

KINDS: Final[dict[Kind, str]] = {
    "reasoning_stripped": "Reasoning of an earlier reply is not in the prompt any more.",
    "tool_call_rewritten": "A tool call came back spelt otherwise: other spaces, other order of its arguments.",
    "retokenized": "The same text was cut into other tokens.",
    "whitespace": "The text differs in whitespace alone.",
    "template": "The chat template wrote an earlier turn, or what stands around it, otherwise than before.",
    "edited": "The agent changed a message.",
    "other": "None of these could be shown.",
    "unexplained": "The texts that decide were not looked up: the time or the number of look-ups was used up.",
}

_AROUND: Final = 8  # ids shown on either side of the boundary
_OPENING: Final = 8  # a reply's thoughts may be opened by the prompt, that many ids before
_LOOKED_BACK: Final = 4  # replies among which one is sought that differs in one message
_COMPARED: Final = 64  # replies to the same messages that a changed one is compared with, the youngest


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a step's prompt parts from the ids of an earlier node that its messages go on from.

    `changed` is what the agent changed of the messages, if it did. `in_reply`: the ids part within a sampled reply;
    `thought`, `called`: that reply reasoned, or called tools.
    """

    step_id: str
    earlier: Node
    index: int
    around_from: int
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    changed: Change | None
    in_reply: bool
    thought: bool
    called: bool


@dataclass(frozen=True, slots=True)
class Drift:
    """One boundary, explained: the step, the earlier node, and where their ids part.

    `index` is the first differing position in the full ids; the ids around it start at `around_from`. `texts` is `ok` where
    there are both texts, else why there are none: neither a tokenizer nor the engine gives them (`unavailable`), the time
    limit passed (`timeout`), too many boundaries came before (`over_limit`), or nobody wanted them. `kind` is one of `KINDS`.
    """

    step_id: str
    earlier_step_id: str
    earlier_choice: int
    index: int
    around_from: int
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    expected_text: str | None = None
    found_text: str | None = None
    texts: Texts = "unavailable"
    kind: Kind = "other"


def find_boundaries(tree: Tree) -> list[Boundary]:
    """Every boundary of a tree, the oldest first. Steps need their requests and responses."""
    memory = _Memory(tree)
    found: list[Boundary] = []
    seen: set[str] = set()
    for node in tree.nodes:
        if not node.step.is_chat or node.step.step_id in seen:
            continue
        seen.add(node.step.step_id)
        messages = messages_of(node.step)
        earlier, changed = memory.earlier(messages)
        if earlier and not any(place in earlier for place in tree.beginnings(node)):
            found.append(_boundary(tree, node, next(iter(earlier.values())), changed))
        memory.add(messages, list(_replies(tree, node.step)))
    return found


def explain(
    boundary: Boundary,
    expected_text: str | None = None,
    found_text: str | None = None,
    *,
    missing: Texts = "unavailable",
) -> Drift:
    """The boundary with its kind, by the texts of its ids; `missing` says why there are none, if there are none."""
    texts: Texts = missing if expected_text is None or found_text is None else "ok"
    return Drift(
        step_id=boundary.step_id,
        earlier_step_id=boundary.earlier.step.step_id,
        earlier_choice=boundary.earlier.choice.index,
        index=boundary.index,
        around_from=boundary.around_from,
        expected_ids=boundary.expected_ids,
        found_ids=boundary.found_ids,
        expected_text=expected_text,
        found_text=found_text,
        texts=texts,
        kind=_kind(boundary, expected_text, found_text, texts),
    )


def _kind(boundary: Boundary, expected: str | None, found: str | None, texts: Texts) -> Kind:
    """Why the ids part. What the messages show comes first, then the texts, then where it is."""
    if boundary.changed is not None:
        return boundary.changed
    if boundary.thought:
        return "reasoning_stripped"
    if expected is not None and found is not None:
        if boundary.in_reply and expected.count("think>") > found.count("think>"):
            return "reasoning_stripped"  # a parser may take the marks of empty thoughts out of the message
        if _agree(expected, found):
            return "retokenized"
        if _agree("".join(expected.split()), "".join(found.split())):
            return "whitespace"
    if texts in ("timeout", "over_limit"):
        return "unexplained"
    if not boundary.in_reply:
        return "template"
    return "tool_call_rewritten" if boundary.called else "other"


def _agree(one: str, other: str) -> bool:
    """Whether two texts are the same, as far as both go: the same number of ids may reach further in one."""
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]


class _Memory:
    """The conversations of earlier steps."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._digests = Digests()
        # The nodes after messages and reply, and after messages alone with their replies: one of each full ids, the oldest.
        self._replied: dict[bytes, dict[int, Node]] = {}
        self._requested: dict[bytes, dict[int, tuple[Any, Node]]] = {}
        self._recent: deque[tuple[list[Any], Node]] = deque(maxlen=_LOOKED_BACK)

    def earlier(self, messages: list[Any]) -> tuple[Mapping[int, Node], Change | None]:
        """Return the nodes that messages go on from, and what was changed of theirs; none if they go on from nothing.

        Nodes are by `Tree.same`: of several with the same full ids the oldest stands for all.
        """
        chain = self._digests.chain(messages)
        whole = next((place for place in reversed(range(len(chain))) if chain[place] in self._replied), -1)
        # A later reply that came back changed shows more than an earlier one that came back as it was.
        for place in reversed(range(max(whole + 1, 1), len(chain))):
            replies = self._requested.get(chain[place - 1], {}) if _is_reply(messages[place]) else {}
            youngest = islice(reversed(replies.values()), _COMPARED)
            changes = [(changed, node) for reply, node in youngest if (changed := change(reply, messages[place]))]
            if changes:
                nearest = min(reversed(changes), key=lambda pair: pair[0] == "edited")
                return {self._tree.same(nearest[1]): nearest[1]}, nearest[0]
        if whole >= 0:
            return self._replied[chain[whole]], None
        node = self._one_message_apart(messages) if chain else None
        return ({self._tree.same(node): node}, "edited") if node is not None else ({}, None)

    def add(self, messages: list[Any], replies: Sequence[tuple[Any, Node]]) -> None:
        """Remember the messages of a step, and the replies to them."""
        chain = self._digests.chain(messages)
        if not chain:
            return
        for message, node in replies:
            place = self._tree.same(node)
            self._replied.setdefault(self._digests.link(chain[-1], message), {}).setdefault(place, node)
            self._requested.setdefault(chain[-1], {}).setdefault(place, (message, node))
        for message, node in replies[-_LOOKED_BACK:]:
            self._recent.append(([*messages, message], node))

    def _one_message_apart(self, messages: list[Any]) -> Node | None:
        """Return the youngest node whose messages and reply these begin with, but for one message of several."""
        node: Node
        for before, node in reversed(self._recent):
            if 2 < len(before) <= len(messages):
                pairs = zip(before, messages, strict=False)
                if sum(self._digests.of(one) != self._digests.of(other) for one, other in pairs) == 1:
                    return node
        return None


def _is_reply(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _boundary(tree: Tree, node: Node, before: Node, changed: Change | None) -> Boundary:
    full = before.prompt + before.choice.ids
    prompt = node.prompt[:]
    index = _first_difference(full, prompt)
    start = max(index - _AROUND, 0)
    reply = next((turn for turn in tree.path(before) if index < turn.end), before)
    message = answers_of(reply.step).get(reply.choice.index, {}).get("message")
    in_reply = reply.start <= index
    return Boundary(
        step_id=node.step.step_id,
        earlier=before,
        index=index,
        around_from=start,
        expected_ids=tuple(full[start : index + _AROUND]),
        found_ids=tuple(prompt[start : index + _AROUND]),
        changed=changed,
        in_reply=in_reply,
        thought=thinks(message) and reply.start - _OPENING <= index,
        called=calls_tools(message),
    )


def _first_difference(left: Ids, right: Ids) -> int:
    """Return the first index at which they differ, or the shorter one's length; by halves, since slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _replies(tree: Tree, step: Step) -> Iterator[tuple[Any, Node]]:
    """Return the message of each choice of a step, with its node."""
    answers = answers_of(step)
    for node in tree.nodes_of(step):
        message = answers.get(node.choice.index, {}).get("message")
        if isinstance(message, dict):
            yield message, node
