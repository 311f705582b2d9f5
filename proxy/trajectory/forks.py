"""Why a rollout forked: how a step relates to the earlier step from which it departs.

The tree is built from ids; the kinds of forks explain it from the requests. They are a report, as drift is.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import orjson

from proxy.trajectory.blocks import count_equal
from proxy.trajectory.conversation import Digests
from proxy.trajectory.step import answers_of, messages_of
from proxy.trajectory.tree import Key, Node, Tree, earlier_attempts

Kind = Literal["choice", "retry", "drift", "repeated", "rewound", "edited", "branch", "conversation"]

KINDS: Final[Mapping[Kind, str]] = {
    "choice": "another choice of the same call (n > 1)",
    "retry": "the client retried the call",
    "drift": "the messages continue an earlier step, but its token ids differ",
    "repeated": "the same messages were sent again",
    "rewound": "the agent removed the last messages and went back",
    "edited": "the agent changed an earlier message",
    "branch": "another message follows the same history",
    "conversation": "a new conversation, such as that of a sub-agent",
}
_CANDIDATES: Final = 4  # the newest siblings that a step is compared with
_SHOWN: Final = 200  # characters of a message


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a step is a fork, and the earlier step it was compared with.

    `message` is the index of the first message that differs, `expected` and `found` begin the texts of both; None if no message
    differs.
    """

    kind: Kind
    step_id: str
    message: int | None = None
    expected: str | None = None
    found: str | None = None


def find_forks(tree: Tree, drifting: Container[str] = ()) -> dict[Key, Fork]:
    """Return the forks: nodes that are not the oldest child of their parent. `drifting` are the steps with drift."""
    roots = [node for node in tree.nodes if node.parent is None]
    families = (roots, *([tree.nodes[at] for at in children] for children in tree.children if len(children) > 1))
    attempts = earlier_attempts({node.step.step_id: node.step for node in tree.nodes}.values())
    digests = Digests()
    found = {}
    for family in families:
        for at, node in enumerate(islice(family, 1, None), 1):
            before = [*family[max(0, at - _CANDIDATES) : at]]
            if node.parent is None and tree.nodes[node.position - 1] not in before:
                before.append(tree.nodes[node.position - 1])  # the conversation may have gone on since it began
            found[node.key] = _fork(node, before[::-1], attempts, drifting, digests)
    return found


def _fork(
    node: Node, before: Sequence[Node], attempts: Mapping[str, str], drifting: Container[str], digests: Digests
) -> Fork:
    step_id = node.step.step_id
    if before[0].step is node.step:
        return Fork("choice", step_id)
    if step_id in attempts:
        return Fork("retry", attempts[step_id])
    sent = [digests.of(message) for message in messages_of(node.step)]

    def shared(other: Node) -> int:
        return count_equal([digests.of(message) for message in _conversation(other)], sent)

    def closeness(other: Node) -> tuple[int, bool]:
        return shared(other), len(messages_of(other.step)) == len(sent)

    nearest = max(before, key=closeness)
    if step_id in drifting:
        return Fork("drift", nearest.step.step_id)
    return _compared(node, nearest, shared(nearest))


def _compared(node: Node, nearest: Node, same: int) -> Fork:
    """Compare the messages of a node with those of an earlier one, and with its reply. `same`: how many are equal."""
    sent, earlier, whole = messages_of(node.step), messages_of(nearest.step), _conversation(nearest)
    name = nearest.step.step_id
    if sent and same == len(sent) == len(earlier):
        return Fork("repeated", name)
    is_same_task = any(isinstance(message, dict) and message.get("role") == "user" for message in whole[:same])
    if node.parent is None and not is_same_task:
        return Fork("conversation", name)
    if same == len(sent):
        return Fork("rewound", name)
    kind: Kind = "branch" if node.parent is not None and same >= len(earlier) - 1 else "edited"
    return Fork(kind, name, same, _text(whole, same), _text(sent, same))


def _conversation(node: Node) -> list[Any]:
    """Return the messages of a node, and its reply."""
    reply = answers_of(node.step).get(node.choice.index, {}).get("message")
    return [*messages_of(node.step), *([reply] if isinstance(reply, dict) else [])]


def _text(messages: Sequence[Any], at: int) -> str | None:
    """Return the beginning of a message; None if there is none."""
    if at >= len(messages):
        return None
    message = messages[at]
    content = message.get("content") if isinstance(message, dict) else message
    if not isinstance(content, str):
        content = orjson.dumps(message, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    return content[:_SHOWN]
