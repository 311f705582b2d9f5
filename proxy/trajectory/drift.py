"""Drift: a step whose messages go on from an earlier step's, while its prompt ids do not.

Holds the finding of such boundaries. It reports and decides nothing: whether steps join is the tree's, by ids alone.

Messages are compared by what an agent sends back: role, content, and the names and arguments of tool calls. What engines
add to a reply (nulls, refusal, reasoning, ids of calls) and agents commonly leave out is no difference.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from proxy.trajectory.step import Ids, Step
from proxy.trajectory.tree import Node, Tree

_AROUND = 4  # ids shown on either side of the boundary


@dataclass(frozen=True, slots=True)
class Drift:
    """One boundary: the step, the earlier node whose messages it goes on from, and where their ids part.

    `index` is the first differing position in the full ids; the ids around it start at `around_from`.
    """

    step_id: str
    earlier_step_id: str
    earlier_choice: int
    index: int
    around_from: int
    expected_ids: tuple[int, ...]
    found_ids: tuple[int, ...]
    kind: str = "other"


def find_drift(tree: Tree) -> list[Drift]:
    """Every boundary of a tree, the oldest first. Steps need their requests and responses."""
    digests = _Digests()
    said: dict[bytes, list[Node]] = {}
    found: list[Drift] = []
    seen: set[str] = set()
    for node in tree.nodes:
        if node.step.dialect != "chat" or node.step.step_id in seen:
            continue
        seen.add(node.step.step_id)
        chain = digests.chain(node.step.request.get("messages"))
        found += _drift(node, next((said[link] for link in reversed(chain) if link in said), []))
        for message, sibling in _replies(tree, node.step):
            said.setdefault(digests.link(chain[-1] if chain else b"", message), []).append(sibling)
    return found


def _drift(node: Node, earlier: list[Node]) -> list[Drift]:
    """The boundary between a node and those it goes on from in words; none if it hangs under one of them."""
    prompt = node.prompt
    if not earlier or any(_extends(prompt, before) for before in earlier):
        return []
    before = earlier[0]
    full = before.prompt + before.choice.ids
    index = _first_difference(full, prompt)
    start = max(index - _AROUND, 0)
    return [
        Drift(
            step_id=node.step.step_id,
            earlier_step_id=before.step.step_id,
            earlier_choice=before.choice.index,
            index=index,
            around_from=start,
            expected_ids=tuple(full[start : index + _AROUND]),
            found_ids=tuple(prompt[start : index + _AROUND]),
        )
    ]


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
    choices = (step.response or {}).get("choices") or []
    messages = {choice.get("index"): choice.get("message") for choice in choices if isinstance(choice, dict)}
    for node in tree.nodes_of(step):
        if isinstance(messages.get(node.choice.index), dict):
            yield messages[node.choice.index], node


class _Digests:
    """Digests of message lists, by their last message and all before it; each parsed message is digested once."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, bytes]] = {}  # by id(): the messages of one rollout's steps are shared objects
        self._before: tuple[list[Any], list[bytes]] = ([], [])

    def chain(self, messages: Any) -> list[bytes]:
        """The digest of each beginning of the list, the shortest first."""
        if not isinstance(messages, list):
            return []
        before, links = self._before
        # Most lists go on from the one before. Lists of shared objects compare at once; digests would make turns².
        links = links.copy() if messages[: len(before)] == before else []
        for message in messages[len(links) :]:
            links.append(self.link(links[-1] if links else b"", message))
        self._before = (messages, links)
        return links

    def link(self, before: bytes, message: Any) -> bytes:
        """The digest of a list that ends in this message."""
        known = self._of.get(id(message))
        if known is None:
            known = self._of[id(message)] = (
                message,
                blake2b(orjson.dumps(_essence(message)), digest_size=16).digest(),
            )
        return blake2b(before + known[1], digest_size=16).digest()


def _essence(message: Any) -> Any:
    """What an agent carries of a message."""
    if not isinstance(message, Mapping):
        return message
    calls = message.get("tool_calls") or []
    functions = [call.get("function") or {} for call in calls if isinstance(call, Mapping)]
    return [
        message.get("role"),
        message.get("content") or "",
        [[function.get("name"), function.get("arguments")] for function in functions if isinstance(function, Mapping)],
        message.get("tool_call_id"),
    ]
