"""The outline of a rollout's tree, which `GET /rollouts/{id}/tree` returns, and why it forked.

The tree is built from ids; the kinds of forks explain it from the requests: how a step relates to the earlier step from which
it departs. They are a report, as drift is.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from typing import Any, Final, Literal

import orjson

from proxy.trajectory.blocks import count_equal
from proxy.trajectory.conversations import Digests, replies_of, role_of
from proxy.trajectory.drift import Drift
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Sequences, sequences
from proxy.trajectory.step import BRANCHED_FROM, DEFAULT_POLICY, Choice, Step, answers_of, messages_of
from proxy.trajectory.threads import Threads, find_threads
from proxy.trajectory.tree import Key, Node, Tree, earlier_attempts, grow

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
_CONTINUATION: Final = ("step_id", "choice", "kept", "bridge", "rendered", "reason")  # of the recorded facts
_OPENING: Final = 80  # characters of a reply, for one line of a list
_WIDTH: Final = 0.5
_BINS: Final = 20  # down to -10; lower logprobs are rare


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a step is a fork."""

    kind: Kind
    step_id: str  # of the earlier step that it was compared with
    message: int | None = None  # the index of the first message that differs, if one does
    expected: str | None = None  # the beginning of its text in the earlier step
    found: str | None = None  # and in the fork


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
    """Compare the messages of a node with the messages and reply of an earlier node; the first `same` are equal."""
    sent, earlier, whole = messages_of(node.step), messages_of(nearest.step), _conversation(nearest)
    name = nearest.step.step_id
    if sent and same == len(sent) == len(earlier):
        return Fork("repeated", name)
    is_same_task = any(role_of(message) == "user" for message in whole[:same])
    if node.parent is None and not is_same_task:
        return Fork("conversation", name)
    if same == len(sent):
        return Fork("rewound", name)
    kind: Kind = "branch" if node.parent is not None and same >= len(earlier) - 1 else "edited"
    return Fork(kind, name, same, _text(whole, same), _text(sent, same))


def _conversation(node: Node) -> list[Any]:
    reply = replies_of(node.step).get(node.choice.index)
    return [*messages_of(node.step), *([] if reply is None else [reply])]


def _text(messages: Sequence[Any], at: int) -> str | None:
    if at >= len(messages):
        return None
    message = messages[at]
    content = message.get("content") if isinstance(message, dict) else message
    if not isinstance(content, str):
        content = orjson.dumps(message, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    return content[:_SHOWN]


def outline(
    steps: Sequence[Step],
    facts: RolloutFacts,
    drift: Sequence[Drift] = (),
    *,
    reasons: Mapping[Any, str] | None = None,
    exports: Callable[[Step], bool] | None = None,
    threads: Threads | None = None,
) -> dict[str, Any]:
    """Return the tree of all steps, including flagged ones, and the drift that was found in it.

    `branches` and `owner` describe the default export of sequences; `exports` returns whether it contains a step.
    `reasons` are the sentences for the reasons why steps were not continued (docs/continuation.md), by code.
    """
    tree = grow(steps)
    exported = sequences([step for step in steps if exports is None or exports(step)], facts, tree=tree)
    threads = threads or find_threads(steps)
    continuations = {step.step_id: found for step in steps if (found := _continuation(step, reasons or {}))}
    calls = {
        step.step_id: _call(step, continuations.get(step.step_id), threads.of[step.step_id].name) for step in steps
    }
    forks = find_forks(tree, {boundary.step_id for boundary in drift})
    return {
        "rollout_id": facts.rollout_id,
        "nodes": _nodes(steps, tree, exported, calls, forks),
        "logprobs": histogram(node.choice for node in tree.nodes if node.step.inherited is None),
        "drift": [
            {**asdict(boundary), **{name: why[name] for name in ("reason", "why") if name in why}}
            for boundary in drift
            for why in [continuations.get(boundary.step_id, {})]
        ],
        "unplaced": [{**calls[step.step_id], "why": why} for step, why in tree.unplaced],
        "threads": [thread.as_json() for thread in threads.all],
        "counts": _counts(steps, tree, len(exported.branches), len(drift)),
    }


def _nodes(
    steps: Iterable[Step], tree: Tree, exported: Sequences, calls: Mapping[str, Any], forks: Mapping[Key, Fork]
) -> list[dict[str, Any]]:
    branches: dict[Key, list[int]] = {}
    owners: dict[Key, int] = {}
    for number, branch in enumerate(exported.branches):
        for node in branch.path:
            branches.setdefault(node.key, []).append(number)
            if node.position in branch.owned:
                owners[node.key] = number
    superseded = tree.superseded()
    answers = {step.step_id: answers_of(step) for step in steps}
    shown_forks = {key: {**_present(asdict(fork)), "why": KINDS[fork.kind]} for key, fork in forks.items()}
    return [
        {
            "node": node.position,
            **calls[node.step.step_id],
            "choice": node.choice.index,
            "parent": node.parent,
            "start": node.start,
            "end": node.end,
            "finish_reason": node.choice.finish_reason,
            "opening": _opening(answers[node.step.step_id].get(node.choice.index, {})),
            "superseded": node.position in superseded,
            "branches": branches.get(node.key, []),
            "owner": owners.get(node.key),
            **({"fork": shown_forks[node.key]} if node.key in shown_forks else {}),
        }
        for node in tree.nodes
    ]


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _call(step: Step, continuation: Mapping[str, Any] | None, thread: str) -> dict[str, Any]:
    """Return the fields of a call for the time line.

    `started_ms` is when it was sent, `ended_ms` when its last byte arrived.
    """
    timing = step.timing
    ended = timing.last_byte or timing.stored
    return {
        "step_id": step.step_id,
        "index": step.index,
        "dialect": step.dialect,
        "started_ms": round((timing.sent or timing.received) * 1000),
        "first_byte_ms": None if timing.first_byte is None else round(timing.first_byte * 1000),
        "ended_ms": None if ended is None else round(ended * 1000),
        "sampled": step.sampled,
        **({} if step.cached_tokens is None else {"cached_tokens": step.cached_tokens}),
        **({} if step.policy == DEFAULT_POLICY else {"policy": step.policy, "model": step.model_served}),
        "policy_version": step.policy_version,
        **({"policy_epoch": step.policy_epoch} if step.policy_epoch else {}),
        "status": step.status,
        "delivered": step.delivered,
        "late": step.late,
        "exact": step.exact,
        "problems": list(step.problems),
        **({} if continuation is None else {"continuation": continuation}),
        **_played(step),
        "thread": thread,
    }


def _played(step: Step) -> dict[str, Any]:
    """Return which step an inherited one was sampled as, or the call of which step a live one repeats."""
    if (inherited := step.inherited) is not None:
        return {"inherited": inherited._asdict()}
    return {BRANCHED_FROM: step.extra[BRANCHED_FROM]} if BRANCHED_FROM in step.extra else {}


def _continuation(step: Step, reasons: Mapping[Any, str]) -> dict[str, Any] | None:
    """Return how a step continues an earlier one by ids, or the reason why it does not; None if neither is recorded."""
    recorded = step.extra.get("continuation")
    if not isinstance(recorded, Mapping):
        return None
    shown = _present({name: recorded.get(name) for name in _CONTINUATION})
    return {**shown, "why": reasons.get(shown["reason"], shown["reason"])} if "reason" in shown else shown


def _opening(answer: Mapping[str, Any]) -> str | None:
    """Return the beginning of a reply: of its text, or of its first tool call if it has no text."""
    message = answer.get("message")
    text = message.get("content") if isinstance(message, dict) else answer.get("text")
    if isinstance(message, dict) and not text:
        calls = message.get("tool_calls")
        call = calls[0] if isinstance(calls, list) and calls else None
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            text = f"calls {function.get('name')} {function.get('arguments')}"
    return text[:_OPENING] if isinstance(text, str) else None


def histogram(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the histogram of the logprobs of sampled tokens.

    `counts[i]` is of logprobs from -`width` * i down to -`width` * (i + 1); the last one includes all lower ones.
    """
    counts = [0] * (_BINS + 1)
    for choice in choices:
        places = Counter(int(min(max(-value, 0.0) / _WIDTH, _BINS)) for value in choice.logprobs if isfinite(value))
        for position, count in places.items():
            counts[position] += count
    return {"width": _WIDTH, "counts": counts}


def _counts(steps: Sequence[Step], tree: Tree, rows: int, drift: int) -> dict[str, int]:
    return {
        "steps": len(steps),
        "nodes": len(tree.nodes),
        "roots": sum(node.parent is None for node in tree.nodes),
        "leaves": len(tree.leaves),
        "sequences": rows,
        "drift": drift,
        "unplaced": len(tree.unplaced),
    }
