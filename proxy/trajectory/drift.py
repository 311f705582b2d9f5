"""Drift: a step whose messages go on from an earlier step's, while its prompt ids do not.

Holds the finding of such boundaries, and their explanation. It reports and decides nothing: whether steps join is the
tree's, by ids alone. Text comes from outside: it is asked for once the boundaries are found.

A step goes on from an earlier one if its messages begin with that one's messages and reply; or with its messages and a
reply that the agent changed; or if they differ from them in one message alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

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
_LOOKED_BACK: Final = 4  # steps among which one is sought that differs in one message


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
    memory = _Memory()
    found: list[Boundary] = []
    seen: set[str] = set()
    for node in tree.nodes:
        if not node.step.is_chat or node.step.step_id in seen:
            continue
        seen.add(node.step.step_id)
        earlier, changed = memory.earlier(node.step.body.get("messages"))
        if earlier and not any(_extends(node.prompt, before) for before in earlier):
            found.append(_boundary(tree, node, earlier[0], changed))
        memory.add(node.step, list(_replies(tree, node.step)))
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

    def __init__(self) -> None:
        self._digests = Digests()
        self._said: dict[bytes, list[Node]] = {}  # by messages and reply
        self._asked: dict[bytes, list[tuple[Any, Node]]] = {}  # by messages alone: the replies to them
        self._lately: list[tuple[list[Any], Node]] = []

    def earlier(self, messages: Any) -> tuple[list[Node], Change | None]:
        """The nodes that messages go on from, and what was changed of theirs; none if they go on from nothing."""
        chain = self._digests.chain(messages)
        whole = next((place for place in reversed(range(len(chain))) if chain[place] in self._said), -1)
        # A later reply that came back changed tells more than an earlier one that came back as it was.
        for place in reversed(range(max(whole + 1, 1), len(chain))):
            replies = self._asked.get(chain[place - 1], ()) if _is_reply(messages[place]) else ()
            changes = [(changed, node) for reply, node in replies if (changed := change(reply, messages[place]))]
            if changes:
                nearest = min(changes, key=lambda pair: pair[0] == "edited")
                return [nearest[1]], nearest[0]
        if whole >= 0:
            return self._said[chain[whole]], None
        node = self._one_message_apart(messages) if chain else None
        return ([node], "edited") if node is not None else ([], None)

    def add(self, step: Step, replies: Sequence[tuple[Any, Node]]) -> None:
        """Remember a step."""
        messages: list[Any] = step.body.get("messages") or []
        chain = self._digests.chain(messages)
        if not chain:
            return
        for message, node in replies:
            self._said.setdefault(self._digests.link(chain[-1], message), []).append(node)
            self._asked.setdefault(chain[-1], []).append((message, node))
            self._lately = [*self._lately[-_LOOKED_BACK + 1 :], ([*messages, message], node)]

    def _one_message_apart(self, messages: list[Any]) -> Node | None:
        """The youngest node whose messages and reply these begin with, but for one message of several."""
        for before, node in self._lately[::-1]:
            if 2 < len(before) <= len(messages):
                pairs = zip(before, messages, strict=False)
                if sum(self._digests.of(one) != self._digests.of(other) for one, other in pairs) == 1:
                    return node
        return None


def _is_reply(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _boundary(tree: Tree, node: Node, before: Node, changed: Change | None) -> Boundary:
    full = before.prompt + before.choice.ids
    index = _first_difference(full, node.prompt)
    start = max(index - _AROUND, 0)
    reply = next((turn for turn in tree.path(before) if index < turn.end), before)
    message = dict(_messages(reply.step)).get(reply.choice.index)
    in_reply = reply.start <= index
    return Boundary(
        step_id=node.step.step_id,
        earlier=before,
        index=index,
        around_from=start,
        expected_ids=tuple(full[start : index + _AROUND]),
        found_ids=tuple(node.prompt[start : index + _AROUND]),
        changed=changed,
        in_reply=in_reply,
        thought=thinks(message) and reply.start - _OPENING <= index,
        called=calls_tools(message),
    )


def _extends(prompt: Ids, before: Node) -> bool:
    return prompt[: before.start] == before.prompt and prompt[before.start : before.end] == before.choice.ids


def _first_difference(left: Ids, right: Ids) -> int:
    """The first index at which they differ, or the shorter one's length; by halves, since slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _replies(tree: Tree, step: Step) -> Iterator[tuple[Any, Node]]:
    """The message of each choice of a step, with its node."""
    messages = dict(_messages(step))
    for node in tree.nodes_of(step):
        if isinstance(messages.get(node.choice.index), dict):
            yield messages[node.choice.index], node


def _messages(step: Step) -> Iterator[tuple[Any, Any]]:
    """The index and the message of each choice of a response."""
    for choice in (step.response or {}).get("choices") or []:
        if isinstance(choice, dict):
            yield choice.get("index"), choice.get("message")
