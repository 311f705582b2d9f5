"""Sequences: the masked rows of tokens that a rollout is trained on.

Holds the choice of branches, the *once* rule and the canonical row, of which every export format is a view.

Rule 1: every decision whether steps join is the tree's; this file only reads it. It compares nothing but numbers of ids.
Rule 2: each sampled token is trained in exactly one of the exported rows: that of its oldest leaf. In others it is
        context, with mask 0.
Rule 3: nothing is padded, shifted or filled: arrays are of one length, and a logprob that is not of a trained token is null.
        So is each of a step whose logprobs nobody asked for (`record.logprobs: off`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Literal

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.fidelity import is_unlogged
from proxy.trajectory.record_values import number
from proxy.trajectory.retokenize import RETOKENIZED
from proxy.trajectory.step import Choice, Span, Step
from proxy.trajectory.tree import Node, Tree, grow, plant

_CUT: Final = frozenset({"length", "abort", "error"})


@dataclass(frozen=True, slots=True)
class Options:
    """Which rows are wanted.

    `branches`: every leaf, the longest one, or the youngest. `include`: exact steps only, or flagged ones as well (whose
    rows then carry the problems), or even `retokenized` ones, whose logprobs are all null. `max_len` in tokens; a longer
    row is `cut` at a span boundary, dropped, or kept.
    """

    branches: Literal["all", "longest", "last"] = "all"
    include: Literal["exact", "flagged", "retokenized"] = "exact"
    max_len: int | None = None
    overlong: Literal["cut", "drop", "keep"] = "cut"


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """A sampled stretch of a sequence, half open. `owned`: trained here; else it is context, trained elsewhere.

    `constrained` is that of its step.
    """

    start: int
    end: int
    step_id: str
    choice: int
    policy_version: str | None
    temperature: float | None
    owned: bool
    constrained: bool | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One path of the tree, as a row. All arrays are of one length; `logprobs` is None where `mask` is 0.

    `truncated`: its last turn was not ended by the model (`is_cut`), or `max_len` shortened the row.
    """

    facts: RolloutFacts
    branch: int
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float | None]
    prompt_len: int
    spans: tuple[SequenceSpan, ...]
    finish_reason: str | None
    truncated: bool
    stop_token_sampled: bool | None
    problems: tuple[str, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """The canonical row, JSON-ready."""
        steps = {span.step_id for span in self.spans}
        row = {
            "rollout_id": self.facts.rollout_id,
            "group_id": self.facts.group_id,
            "branch": self.branch,
            "token_ids": self.token_ids,
            "mask": self.mask,
            "logprobs": self.logprobs,
            "prompt_len": self.prompt_len,
            "spans": [_span_row(span) for span in self.spans],
            "finish_reason": self.finish_reason,
            "truncated": self.truncated,
            "stop_token_sampled": self.stop_token_sampled,
            "reward": self.facts.reward,
            "step_rewards": {step: reward for step, reward in self.facts.step_rewards.items() if step in steps},
            "advantages": self.facts.advantages,
            "owned": any(span.owned for span in self.spans),
            "metadata": dict(self.facts.metadata),
        }
        return {**row, "problems": list(self.problems)} if self.problems else row


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that nothing is trained of, or not all of it, and why."""

    step_id: str
    why: str


@dataclass(slots=True)
class Branch:
    """A path of the tree that becomes a row. `owned` has the places of the nodes that are trained in this row.

    `cut` marks a path that `max_len` shortened.
    """

    path: list[Node]
    cut: bool = False
    owned: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        """The length of the row in tokens."""
        return self.path[-1].end

    @property
    def owned_nodes(self) -> list[Node]:
        """The nodes that are trained in this row, in the order of their tokens."""
        return [node for node in self.path if node.place in self.owned]

    @property
    def step_ids(self) -> tuple[str, ...]:
        """The ids of the steps that are trained in this row."""
        return tuple(dict.fromkeys(node.step.step_id for node in self.owned_nodes))


@dataclass(frozen=True, slots=True)
class Sequences:
    """The branches that become the rows of a rollout, and what was left out.

    Rows are built when they are read, one at a time: a row of 200,000 tokens takes 12 MB as Python lists.
    """

    facts: RolloutFacts
    branches: tuple[Branch, ...]
    skipped: tuple[Skipped, ...]

    def each(self) -> Iterator[Row]:
        """Build the rows one after the other, the oldest leaf's first."""
        for place, branch in enumerate(self.branches):
            yield _row(branch, self.facts, place)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows at once."""
        return tuple(self.each())


def sequences(
    steps: Iterable[Step], facts: RolloutFacts, options: Options | None = None, *, tree: Tree | None = None
) -> Sequences:
    """Choose the branches of a rollout that become rows, the oldest leaf's first; `tree` is that of all steps, if known."""
    options = options or Options()
    steps = list(steps)
    chosen, skipped = select(steps, options)
    if options.include == "exact" and any(step.late for step in steps):
        # Where a late step is no row itself, it may not supersede an earlier one: the export would change after the finish.
        tree = grow([step for step in steps if not step.late])
    whole = grow(steps) if tree is None else tree
    replaced = {whole.nodes[place].key for place in whole.superseded()}
    kept = [(step, choice) for step, choice in chosen if (step.step_id, choice.index) not in replaced]
    skipped += [
        Skipped(step.step_id, "superseded by a retry")
        for step, choice in chosen
        if (step.step_id, choice.index) in replaced
    ]
    planted = whole if len(kept) == len(whole.nodes) else plant(kept)
    wanted = [Branch(planted.path(leaf)) for leaf in _wanted(planted.leaves, options)]
    branches = [fitting for branch in wanted if (fitting := _fit(branch, options)) is not None]
    _own(branches)
    skipped += _untrained(planted, wanted, branches, options)
    # A branch that was cut to what others train has nothing of its own.
    return Sequences(facts, tuple(branch for branch in branches if branch.owned), tuple(dict.fromkeys(skipped)))


def select(steps: Iterable[Step], options: Options) -> tuple[list[tuple[Step, Choice]], list[Skipped]]:
    """The choices that may make rows, in order of age, and why the others may not."""
    kept: list[tuple[Step, Choice]] = []
    skipped: list[Skipped] = []
    for step in sorted(steps, key=lambda step: step.step_id):
        if not step.choices:
            skipped.append(Skipped(step.step_id, ",".join(step.problems) or "nothing was sampled"))
        unlogged = is_unlogged(step)
        for choice in sorted(step.choices, key=lambda choice: choice.index):
            why = _why_not(step, choice, options, unlogged=unlogged)
            if why is None:
                kept.append((step, choice))
            else:
                skipped.append(Skipped(step.step_id, why))
    return kept, list(dict.fromkeys(skipped))


def _why_not(step: Step, choice: Choice, options: Options, *, unlogged: bool) -> str | None:
    """Why a choice may not be exported; None if it may. What cannot be aligned never is."""
    codes = ",".join(step.problems)
    if not 0 <= choice.prompt < len(step.prompts):
        return codes or "the engine gave no prompt ids"
    if not choice.ids:
        return codes or "nothing was sampled"
    if RETOKENIZED in step.problems:
        return None if options.include == RETOKENIZED else codes
    # A missing logprob is NaN, and so is then the sum. No trainer can do with one, and JSON cannot carry it.
    aligned = unlogged or len(choice.ids) == len(choice.logprobs)
    if not aligned or not isfinite(sum(choice.logprobs)):
        return codes or "its tokens cannot be aligned with logprobs"
    if options.include != "exact" or step.trainable:
        return None
    if step.late:
        return codes or "it ended after the rollout was finished"
    return codes or (f"its status is {step.status}" if step.status != "complete" else "it was not delivered")


def _wanted(leaves: list[Node], options: Options) -> list[Node]:
    if options.branches == "all" or not leaves:
        return leaves
    if options.branches == "last":
        return [max(leaves, key=lambda leaf: leaf.key)]
    return [max(leaves, key=lambda leaf: leaf.end)]  # of equals, max keeps the first: the oldest


def _fit(branch: Branch, options: Options) -> Branch | None:
    """The branch within `max_len`; None if it is to be dropped, or nothing sampled would be left of it."""
    if options.max_len is None or branch.end <= options.max_len or options.overlong == "keep":
        return branch
    fitting = [node for node in branch.path if node.end <= options.max_len]
    return None if options.overlong == "drop" or not fitting else Branch(fitting, cut=True)


def _own(branches: Sequence[Branch]) -> None:
    """Give each node to the first branch that holds it: branches are in the order of their leaves' age."""
    given: set[int] = set()
    for branch in branches:
        branch.owned = {node.place for node in branch.path if node.place not in given}
        given |= branch.owned


def _untrained(tree: Tree, wanted: list[Branch], branches: list[Branch], options: Options) -> Iterator[Skipped]:
    """The nodes that no row trains, and why."""
    trained = {place for branch in branches for place in branch.owned}
    reached = {node.place for branch in wanted for node in branch.path}
    for node in tree.nodes:
        if node.place not in trained:
            overlong = node.place in reached
            why = f"longer than max_len={options.max_len}" if overlong else f"not on the {options.branches} branch"
            yield Skipped(node.step.step_id, why)


def _row(branch: Branch, facts: RolloutFacts, place: int) -> Row:
    leaf = branch.path[-1]
    token_ids = (leaf.prompt + leaf.choice.ids).tolist()
    mask = [0] * len(token_ids)
    logprobs: list[float | None] = [None] * len(token_ids)
    spans: list[SequenceSpan] = []
    problems: dict[str, None] = {}
    for node in branch.path:
        owned = node.place in branch.owned
        spans += _spans(node, owned=owned)
        problems |= dict.fromkeys(_marks(node.step))
        if owned:
            mask[node.start : node.end] = [1] * len(node.choice.ids)
            if RETOKENIZED not in node.step.problems and node.choice.logprobs:  # nobody sampled those, or asked for any
                logprobs[node.start : node.end] = node.choice.logprobs.tolist()
    return Row(
        facts=facts,
        branch=place,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        prompt_len=branch.path[0].start,
        spans=tuple(spans),
        finish_reason=leaf.choice.finish_reason,
        truncated=branch.cut or is_cut(leaf.step, leaf.choice),
        stop_token_sampled=stop_token_sampled(leaf),
        problems=tuple(problems),
    )


def _marks(step: Step) -> Iterator[str]:
    """What keeps a step from being trained unasked: its problems, and how it ended if not well."""
    yield from step.problems
    if step.status != "complete":
        yield step.status
    if not step.delivered:
        yield "undelivered"
    if step.late:
        yield "late"


def _spans(node: Node, *, owned: bool) -> list[SequenceSpan]:
    """The spans of a node: one for each version of the weights."""
    temperature = number(node.step.sampling.get("temperature"))
    return [
        SequenceSpan(
            start=node.start + span.start,
            end=node.start + span.end,
            step_id=node.step.step_id,
            choice=node.choice.index,
            policy_version=span.policy_version,
            temperature=temperature,
            owned=owned,
            constrained=node.step.constrained,
        )
        for span in node.choice.spans or (Span(0, len(node.choice.ids), node.step.policy_version),)
    ]


def is_cut(step: Step, choice: Choice) -> bool:
    """Whether something other than the model ended the turn: its limit, an abort, a fault, or a stream that broke off."""
    return step.status == "partial" or choice.finish_reason in _CUT


def stop_token_sampled(leaf: Node) -> bool | None:
    """Whether the last id is the token that ended the turn; None where the engine does not say.

    vLLM 0.32: an EOS has no stop_reason, a stop token its id, a stop string itself (then the last id is whatever token
    completed it). It says "tool_calls" of a parsed call however the turn ended, at `max_tokens` too.
    """
    finish, stop = leaf.choice.finish_reason, leaf.choice.stop_reason
    if finish in {"length", "abort", "error", "repetition"}:
        return False
    if finish == "stop" and stop is None:
        return True
    return True if finish in {"stop", "tool_calls"} and isinstance(stop, int) else None


def _span_row(span: SequenceSpan) -> Mapping[str, Any]:
    return {
        "start": span.start,
        "end": span.end,
        "step_id": span.step_id,
        "choice": span.choice,
        "policy_version": span.policy_version,
        "temperature": span.temperature,
        "owned": span.owned,
        "constrained": span.constrained,
    }
