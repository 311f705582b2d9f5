"""The canonical rows, from which every export format is made: token sequences with a loss mask; and the scores of a row.

Rule 1: only the tree decides whether steps join; this module compares nothing but numbers of ids.
Rule 2: exactly one of the exported rows trains a sampled token: the row of its oldest leaf. In other rows the token is
        context, with mask 0. No row trains what a playback inherited, unless `Options.inherited` is `trained`.
Rule 3: nothing is padded, shifted or filled: arrays have one length, and the logprob of a token that is not trained is
        null. If no logprobs were requested for a step (`record.logprobs: off`), all of them are null.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from math import isfinite
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeVar

import orjson
from msgspec import Struct
from msgspec.structs import asdict

from proxy.trajectory.arrays import (
    Ids,
    Logprobs,
    Mask,
    are_finite,
    floats_with_gaps,
    ids_from_little_endian,
    logprobs_from_little_endian,
    to_little_endian,
    unpack_mask,
)
from proxy.trajectory.experts_and_masks import ExpertRows, expert_rows, join_experts
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.retokenize import RETOKENIZED
from proxy.trajectory.step import DEFAULT_POLICY, LOGPROB_CEILING, LOGPROB_CLAMP, Choice, Span, Step, is_unlogged
from proxy.trajectory.tree import Node, Tree, grow, plant

T = TypeVar("T")
Role = Literal["proximal", "teacher"]
Inherited = Literal["prompt", "masked", "trained"]
_CUT: Final = frozenset({"length", "abort", "error"})


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs of the trained tokens of a row, in their order, as float32, and what computed them.

    `top_ids` and `top_logprobs` have the `top_k` most likely tokens in place of each trained one, the most likely first.
    """

    engine: str
    model: str | None
    policy_version: str | None
    logprobs: Logprobs
    top_k: int = 0
    top_ids: Ids = field(default_factory=lambda: array("i"))
    top_logprobs: Logprobs = field(default_factory=lambda: array("f"))

    def described(self) -> dict[str, Any]:
        """Return what computed the scores, as JSON values."""
        return {"engine": self.engine, "model": self.model, "policy_version": self.policy_version}

    def filled(self, mask: Iterable[int], fill: T) -> list[float | T]:
        """Return a list with the logprob where `mask` is 1, and `fill` elsewhere."""
        values = iter(self.logprobs)
        return [next(values) if trained else fill for trained in mask]

    def filled_top(self, mask: Iterable[int], fill: Any) -> tuple[list[Any], list[Any]]:
        """Return a list of the most likely ids and one of their logprobs where `mask` is 1, with `fill` elsewhere."""
        ids, logprobs = _chunks(self.top_ids, self.top_k), _chunks(self.top_logprobs, self.top_k)
        bits = list(mask)
        return [next(ids) if bit else fill for bit in bits], [next(logprobs) if bit else fill for bit in bits]


def _chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(values)
    while True:
        yield list(islice(remaining, size))


def are_logprobs(values: Sequence[float]) -> bool:
    """Return whether all values are finite logprobs, and none is the engine's value for a probability of 0."""
    return all(isfinite(value) and LOGPROB_CLAMP < value <= LOGPROB_CEILING for value in values)


def encode_scores(scores: Scores) -> bytes:
    """Return the scores as bytes."""
    head = [scores.engine, scores.model, scores.policy_version, len(scores.logprobs), scores.top_k]
    arrays = (scores.logprobs, scores.top_ids, scores.top_logprobs)
    return orjson.dumps(head) + b"\n" + b"".join(to_little_endian(values) for values in arrays)


def decode_scores(encoded: bytes) -> Scores | None:
    """Return the scores of `encode_scores`; None if another version wrote the bytes."""
    head, newline, raw = encoded.partition(b"\n")
    try:
        engine, model, policy_version, count, top_k = orjson.loads(head)
        first, second = 4 * count, 4 * count * (1 + top_k)
        if not newline or len(raw) != second + 4 * count * top_k:
            return None
        top_ids, top = ids_from_little_endian(raw[first:second]), logprobs_from_little_endian("f", raw[second:])
        logprobs = logprobs_from_little_endian("f", raw[:first])
        names = (engine, model, policy_version)
        if not all(name is None or isinstance(name, str) for name in names) or not are_logprobs((*logprobs, *top)):
            return None
        return Scores(engine, model, policy_version, logprobs, top_k, top_ids, top)
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Options:
    """Which rows are exported."""

    # Every leaf, or the longest or youngest one of each policy. `one`: every leaf; formats refuse several in one thread.
    branches: Literal["all", "one", "longest", "last"] = "all"
    # `flagged`: also flagged steps; their rows list the problems. `retokenized`: these too, all logprobs null.
    include: Literal["exact", "flagged", "retokenized"] = "exact"
    max_len: int | None = None  # the maximum number of tokens
    overlong: Literal["cut", "drop", "keep"] = "cut"  # a longer row, at a span boundary
    row_weight: Literal["full", "split"] = "full"  # each row has the rollout's whole reward and advantage, or a share
    # A row of a playback begins with the prompt of its first live token, or with the rollout's first prompt, and inherited
    # tokens are context. `trained`: they are trained as if they were live.
    inherited: Inherited = "prompt"
    own: frozenset[str] = frozenset()  # other rollouts without rows: what was inherited of them is as live

    def is_live(self, step: Step) -> bool:
        """Return whether no other rollout trains a step."""
        return (of := step.inherited) is None or of.rollout_id in self.own

    def trains(self, step: Step) -> bool:
        """Return whether a step may be trained in its rollout."""
        return self.inherited == "trained" or self.is_live(step)


class SequenceSpan(Struct, frozen=True):
    """A sampled half-open range of a sequence."""

    start: int
    end: int
    step_id: str
    choice: int
    policy_version: str | None
    temperature: float | None
    owned: bool  # trained in this row; else it is context, trained in another one
    constrained: bool | None = None  # `Step.constrained`
    epoch: int = 0  # of the policy, when the call was sent
    logprobs_over: Literal["mask", "truncated"] | None = None  # `Step.logprobs_over`
    resumed: int = 0  # `Step.resumed`
    mixed: bool = False  # after `mixed_from`
    endpoint: str | None = None  # its label
    engine: str | None = None  # the kind of the engine
    model: str | None = None  # that the engine served: a LoRA adapter has its own
    logprobs_mode: str | None = None  # of the engine's logprobs
    top_p: float | None = None  # these three if they truncated the sampling
    top_k: int | None = None
    min_p: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the span as JSON has it: what few spans have is not written for the others."""
        shown = asdict(self)
        for name in ("epoch", "logprobs_over", "resumed", "mixed", "top_p", "top_k", "min_p"):
            if not shown[name]:
                del shown[name]
        return shown


class BranchPoint(NamedTuple):
    """Where the row of a playback leaves what it inherited."""

    of: str  # the rollout that sampled the last step before it
    step_id: str  # this step
    tokens: int  # how many tokens before it were sampled in inherited steps


@dataclass(frozen=True)
class Row:
    """One path of the tree, as a row. Its lists are made when they are read, and have the same length."""

    facts: RolloutFacts
    branch: int
    ids: Ids
    trained: bytearray  # 1 for each token that is trained in this row, else 0
    logged: tuple[tuple[int, Logprobs], ...]  # of these tokens, by the position of the first; a part may have none
    prompt_len: int
    spans: tuple[SequenceSpan, ...]
    finish_reason: str | None
    truncated: bool  # the model did not end its last turn (`is_cut`), or `max_len` shortened the row
    stop_token_sampled: bool | None
    problems: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY
    thread: str | None = None
    masks: tuple[tuple[int, Mask], ...] = ()  # of the tokens that are trained, by the position of the first
    experts: ExpertRows | None = None  # of all tokens but the last; None if some are missing
    inherited: BranchPoint | None = None

    @cached_property
    def token_ids(self) -> list[int]:
        """The ids of all tokens."""
        return self.ids.tolist()

    @cached_property
    def mask(self) -> list[int]:
        """`trained` as a list."""
        return list(self.trained)

    @cached_property
    def logprobs(self) -> list[float | None]:
        """The logprob of each token, or None."""
        logprobs: list[float | None] = [None] * len(self.ids)
        for start, part in self.logged:
            logprobs[start : start + len(part)] = part.tolist()
        return logprobs

    @cached_property
    def sampling_mask(self) -> list[list[int]]:
        """The tokens that sampling could choose from at each position; none where nothing is trained, or without a mask."""
        kept: list[list[int]] = [[] for _ in self.ids]
        for start, mask in self.masks:
            for at, ids in enumerate(unpack_mask(mask), start):
                kept[at] = ids
        return kept

    def as_row(self) -> dict[str, Any]:
        """Return the canonical row as JSON values."""
        return self._row(self.token_ids, self.mask, self.logprobs)

    def as_packed_row(self) -> dict[str, Any]:
        """Return the canonical row with arrays instead of lists of numbers."""
        return self._row(self.ids, self.trained, floats_with_gaps(len(self.ids), self.logged))

    def _row(self, token_ids: Any, mask: Any, logprobs: Any) -> dict[str, Any]:
        steps = dict.fromkeys(span.step_id for span in self.spans)
        row = {
            "rollout_id": self.facts.rollout_id,
            "group_id": self.facts.group_id,
            "branch": self.branch,
            "token_ids": token_ids,
            "mask": mask,
            "logprobs": logprobs,
            "prompt_len": self.prompt_len,
            "spans": [span.as_dict() for span in self.spans],
            "finish_reason": self.finish_reason,
            "truncated": self.truncated,
            "stop_token_sampled": self.stop_token_sampled,
            "reward": self.facts.reward,
            "step_rewards": _of_steps(self.facts.step_rewards, steps),
            "advantages": _of_steps(self.facts.advantages, steps),
            "owned": any(span.owned for span in self.spans),
            "metadata": dict(self.facts.metadata),
        }
        row |= {"problems": list(self.problems)} if self.problems else {}
        if self.masks:
            row["sampling_mask"] = self.sampling_mask
        if self.experts is not None:
            row["routed_experts"] = self.experts.as_dict()
        row |= {} if self.inherited is None else {"inherited": self.inherited._asdict()}
        row |= {} if self.policy == DEFAULT_POLICY else {"policy": self.policy}
        return row if self.thread is None else {**row, "thread": self.thread}


def _of_steps(values: Any, steps: Iterable[str]) -> Any:
    """Keep only these steps in a mapping by step id; return any other value unchanged."""
    return {step: values[step] for step in steps if step in values} if isinstance(values, Mapping) else values


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that is not trained, or only in part, and why."""

    step_id: str
    why: str
    dropped_tokens: int = 0  # sampled ones that would be trained without `branches` or `max_len`


@dataclass(slots=True)
class Branch:
    """A path of the tree that becomes a row."""

    path: list[Node]
    inherited: int = 0  # how many nodes at its beginning are inherited
    mode: Inherited = "prompt"  # what the row has of them
    cut: bool = False  # `max_len` shortened the path
    owned: set[int] = field(default_factory=set)  # the positions of the nodes that are trained in this row

    @property
    def end(self) -> int:
        """The length of the row in tokens."""
        return self.path[-1].end

    @property
    def response_len(self) -> int:
        """The number of tokens from the first one that may be trained to the end."""
        return self.end - self.path[0 if self.mode == "trained" else self.inherited].start

    @property
    def shown(self) -> list[Node]:
        """The nodes from the first prompt of the row on."""
        return self.path[self.inherited :] if self.mode == "prompt" else self.path

    @property
    def point(self) -> BranchPoint | None:
        """Where it leaves what its rollout inherited; None if it does not begin with inherited steps."""
        before = self.path[: self.inherited]
        of = before[-1].step.inherited if before else None
        return None if of is None else BranchPoint(*of, sum(len(node.choice.ids) for node in before))

    @property
    def policy(self) -> str:
        """The policy of its steps."""
        return self.path[-1].step.policy

    @property
    def thread(self) -> str | None:
        """The thread of its steps, if it is known."""
        return self.path[-1].step.thread

    @property
    def owned_nodes(self) -> list[Node]:
        """The nodes that are trained in this row, in the order of their tokens."""
        return [node for node in self.path if node.position in self.owned]

    @property
    def step_ids(self) -> tuple[str, ...]:
        """The ids of the steps that are trained in this row."""
        return tuple(dict.fromkeys(node.step.step_id for node in self.owned_nodes))


@dataclass(frozen=True, slots=True)
class Sequences:
    """The branches that become the rows of a rollout, the facts of each row, and the skipped steps.

    Rows are built when they are read, one at a time: a row of 200,000 tokens takes 12 MB as Python lists.
    """

    facts: Sequence[RolloutFacts]
    branches: tuple[Branch, ...]
    skipped: tuple[Skipped, ...]

    def each(self) -> Iterator[Row]:
        """Build the rows one by one, beginning with the oldest leaf."""
        for position, (branch, facts) in enumerate(zip(self.branches, self.facts, strict=True)):
            yield _row(branch, facts, position)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows at once."""
        return tuple(self.each())


def sequences(
    steps: Iterable[Step], facts: RolloutFacts, options: Options | None = None, *, tree: Tree | None = None
) -> Sequences:
    """Return the branches of a rollout that become rows, the oldest leaf's first; `tree` contains all steps, if it is known."""
    options, steps = options or Options(), list(steps)
    chosen, skipped = select(steps, options)
    context, _ = select([step for step in steps if not options.trains(step)], replace(options, inherited="trained"))
    if options.include == "exact" and any(step.late for step in steps):
        # A late step that is not exported must not supersede an earlier one, or the export would change after the finish.
        tree = grow([step for step in steps if not step.late])
    whole = grow(steps) if tree is None else tree
    replaced = {whole.nodes[position].key for position in whole.superseded()}
    kept = [(step, choice) for step, choice in (*chosen, *context) if (step.step_id, choice.index) not in replaced]
    superseded = (step.step_id for step, choice in chosen if (step.step_id, choice.index) in replaced)
    skipped += [Skipped(step_id, "superseded by a retry") for step_id in superseded]
    planted = whole if len(kept) == len(whole.nodes) else plant(kept)
    wanted = [_branch(planted.path(leaf), options) for leaf in _wanted(_leaves(planted, options), options)]
    branches = [fitting for branch in wanted if (fitting := _fit(branch, options)) is not None]
    assigned: set[int] = set()
    for branch in branches:  # by the age of their leaves: a node is trained in the first row that contains it
        live = [node.position for node in branch.path if options.trains(node.step)]
        branch.owned = {position for position in live if position not in assigned}
        assigned |= branch.owned
    skipped += _untrained(planted, wanted, branches, options)
    # one that was cut to nodes that others train is dropped
    rows = tuple(branch for branch in branches if branch.owned)
    row_facts = facts.of_rows([branch.thread for branch in rows], split=options.row_weight == "split")
    return Sequences(row_facts, rows, tuple(dict.fromkeys(skipped)))


def select(steps: Iterable[Step], options: Options) -> tuple[list[tuple[Step, Choice]], list[Skipped]]:
    """Return the choices that can become rows, by age, and why the others cannot."""
    kept: list[tuple[Step, Choice]] = []
    skipped: list[Skipped] = []
    for step in sorted(steps, key=lambda step: step.step_id):
        if not step.choices:
            skipped.append(Skipped(step.step_id, ",".join(step.problems) or "no token was sampled"))
        unlogged = is_unlogged(step)
        for choice in sorted(step.choices, key=lambda choice: choice.index):
            why = _why_not(step, choice, options, unlogged=unlogged)
            if why is None:
                kept.append((step, choice))
            else:
                skipped.append(Skipped(step.step_id, why))
    return kept, list(dict.fromkeys(skipped))


def _why_not(step: Step, choice: Choice, options: Options, *, unlogged: bool) -> str | None:
    if not options.trains(step):
        return "inherited"
    codes = ",".join(step.problems)
    if not 0 <= choice.prompt < len(step.prompts):
        return codes or "the engine returned no prompt ids"
    if not choice.ids:
        return codes or "no token was sampled"
    if RETOKENIZED in step.problems:
        return None if options.include == RETOKENIZED else codes
    # A missing logprob is NaN. Trainers cannot use it, and JSON cannot represent it.
    aligned = unlogged or len(choice.ids) == len(choice.logprobs)
    if not aligned or not are_finite(choice.logprobs):
        return codes or "token ids and logprobs do not match"
    if options.include != "exact" or step.trainable:
        return None
    if step.late:
        return codes or "ended after the rollout was finished"
    return codes or (f"status {step.status}" if step.status != "complete" else "not delivered")


def _leaves(tree: Tree, options: Options) -> list[Node]:
    """Return the nodes that may be trained and that no such node continues, the oldest first."""
    live = [node for node in tree.nodes if options.trains(node.step)]
    continued: set[int] = set()
    for node in live:
        at = node.parent
        while at is not None and at not in continued:
            continued.add(at)
            at = tree.nodes[at].parent
    return [node for node in live if node.position not in continued]


def _branch(path: list[Node], options: Options) -> Branch:
    live = (index for index, node in enumerate(path) if options.is_live(node.step))
    return Branch(path, next(live, len(path)), options.inherited)


def _wanted(leaves: list[Node], options: Options) -> list[Node]:
    """Return the leaves that become rows, the oldest first."""
    if options.branches in ("all", "one"):
        return leaves
    best: dict[str, Node] = {}
    rank = attrgetter("key" if options.branches == "last" else "end")
    for leaf in leaves:
        best[leaf.step.policy] = max(best.get(leaf.step.policy, leaf), leaf, key=rank)  # of equals the oldest
    return sorted(best.values(), key=attrgetter("position"))


def _fit(branch: Branch, options: Options) -> Branch | None:
    """Return the branch within `max_len`; None if it is dropped, or nothing sampled would be left of it."""
    if options.max_len is None or branch.end <= options.max_len or options.overlong == "keep":
        return branch
    fitting = [node for node in branch.path if node.end <= options.max_len]
    return None if options.overlong == "drop" or not fitting else replace(branch, path=fitting, cut=True)


def _untrained(tree: Tree, wanted: list[Branch], branches: list[Branch], options: Options) -> list[Skipped]:
    trained = {position for branch in branches for position in branch.owned}
    reached = {node.position for branch in wanted for node in branch.path}
    dropped, overlong = dict[tuple[str, str], int](), f"longer than max_len={options.max_len}"
    for node in tree.nodes:
        if node.position not in trained and options.trains(node.step):
            why = overlong if node.position in reached else f"not on the {options.branches} branch"
            dropped[node.step.step_id, why] = dropped.get((node.step.step_id, why), 0) + len(node.choice.ids)
    return [Skipped(step_id, why, count) for (step_id, why), count in dropped.items()]


def _row(branch: Branch, facts: RolloutFacts, position: int) -> Row:
    leaf = branch.path[-1]
    ids = leaf.prompt + leaf.choice.ids
    trained = bytearray(len(ids))
    logged: list[tuple[int, Logprobs]] = []
    spans: list[SequenceSpan] = []
    problems: dict[str, None] = {}
    masks: list[tuple[int, Mask]] = []
    starts = [(node, node.step.experts_start) for node in branch.path]
    for node in branch.shown:
        owned = node.position in branch.owned
        spans += _spans(node, owned=owned)
        problems |= dict.fromkeys(_marks(node.step))
        if owned:
            trained[node.start : node.end] = b"\x01" * len(node.choice.ids)
            if RETOKENIZED not in node.step.problems and node.choice.logprobs:  # not sampled, or not requested
                logged.append((node.start, node.choice.logprobs))
                if (mask := node.choice.sampling_mask) is not None and len(mask.offsets) == len(node.choice.ids) + 1:
                    masks.append((node.start, mask))
    return Row(
        facts=facts,
        branch=position,
        ids=ids,
        trained=trained,
        logged=tuple(logged),
        prompt_len=branch.shown[0].start,
        spans=tuple(spans),
        finish_reason=leaf.choice.finish_reason,
        truncated=branch.cut or is_cut(leaf.step, leaf.choice),
        stop_token_sampled=stop_token_sampled(leaf.choice),
        problems=tuple(problems),
        policy=branch.policy,
        thread=branch.thread,
        masks=tuple(masks),
        # The last sampled token of a step has no experts there: it is read by the next step only.
        experts=join_experts((at, expert_rows(node.choice.routed_experts, node.end - 1 - at)) for node, at in starts),
        inherited=branch.point,
    )


def _marks(step: Step) -> Iterator[str]:
    """Return why a step is not trained by default: its problems, and its status if it is not complete and delivered."""
    yield from step.problems
    if step.status != "complete":
        yield step.status
    if not step.delivered:
        yield "undelivered"
    if step.late:
        yield "late"


def _spans(node: Node, *, owned: bool) -> list[SequenceSpan]:
    """Return the spans of a node: one for each policy version."""
    step = node.step
    temperature, constrained = temperature_of(step), step.constrained
    logprobs_over, mixed = step.logprobs_over(node.choice), mixed_from(step, node.choice)
    mode = step.sampling.get("logprobs_mode")
    mode, truncation = mode if isinstance(mode, str) else None, step.truncation
    return [
        SequenceSpan(
            start=node.start + span.start,
            end=node.start + span.end,
            step_id=step.step_id,
            choice=node.choice.index,
            policy_version=span.policy_version,
            temperature=temperature,
            owned=owned,
            constrained=constrained,
            epoch=span.epoch,
            logprobs_over=logprobs_over,
            resumed=step.resumed,
            mixed=mixed is not None and span.start >= mixed,
            endpoint=step.engine.name,
            engine=step.engine.kind,
            model=step.model_served,
            logprobs_mode=mode,
            **truncation,
        )
        for span in version_spans(step, node.choice)
    ]


def version_spans(step: Step, choice: Choice) -> tuple[Span, ...]:
    """Return the spans of a choice by policy version: of all of its tokens if it has none."""
    return choice.spans or (Span(0, len(choice.ids), step.policy_version),)


def mixed_from(step: Step, choice: Choice) -> int | None:
    """Return the first token of a choice that was sampled over the cache of other weights, or may have been; None for none.

    An engine that changes its weights under a running call keeps the cache of what was sampled before. After a resume it
    computes all of it again. If a version was announced that no span has, the engine reports none, and it is unknown which
    tokens of the last part are of which weights.
    """
    changes = [
        after.start
        for before, after in pairwise(choice.spans)
        if (before.policy_version, before.epoch) != (after.policy_version, after.epoch)
    ]
    if len(changes) > step.resumed:
        return changes[0]
    if step.policy_version_end is None:
        return None
    if step.policy_version_end in {
        step.policy_version,
        *(span.policy_version for each in step.choices for span in each.spans),
    }:
        return None
    return choice.spans[-1].start if choice.spans else 0


def temperature_of(step: Step) -> float | None:
    """Return the temperature of a step; None for anything but a finite number, such as one that a client sent as a string."""
    value: Any = step.sampling.get("temperature")
    return value if type(value) in (int, float) and isfinite(value) else None


def is_cut(step: Step, choice: Choice) -> bool:
    """Return whether something other than the model ended the turn: its limit, an abort, an error, or a lost connection."""
    return step.status == "partial" or choice.finish_reason in _CUT


def stop_token_sampled(choice: Choice) -> bool | None:
    """Return whether the last id is the token that ended the turn; None if the engine does not report it.

    vLLM 0.32: an EOS has no stop_reason, a stop token its id, a stop string itself (the last id is then the token that
    completed it). The finish reason of a parsed call is "tool_calls" however the turn ended, also at `max_tokens`.
    """
    finish, stop = choice.finish_reason, choice.stop_reason
    if finish in {"length", "abort", "error", "repetition"}:
        return False
    if finish == "stop" and stop is None:
        return True
    return True if finish in {"stop", "tool_calls"} and isinstance(stop, int) else None
