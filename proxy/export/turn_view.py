"""Formats with one row for each turn: a prompt and what was sampled after it.

Rows are the turns that canonical rows train, oldest first, limited by `max_len`. Nothing is joined, so no mask is
needed between turns, and a rollout of any shape can be represented.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.export.base import PLAIN, Fill, Format, Plan, skipped_rows
from proxy.export.sequence_view import RowSource
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.ratios import Trained
from proxy.trajectory.retokenize import RETOKENIZED
from proxy.trajectory.sequence import Options, Skipped, is_cut, sequences, stop_token_sampled
from proxy.trajectory.step import Choice, Step, is_unlogged
from proxy.trajectory.tree import Node


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One prompt and what was sampled after it."""

    step: Step
    choice: Choice
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    is_last: bool = False
    cut: bool = False  # `max_len` removed something
    overlong_prompt: bool = False  # it removed all that was sampled, and a part of the prompt

    @property
    def truncated(self) -> bool:
        """Whether `max_len` cut the turn, or something other than the model ended it."""
        return self.cut or is_cut(self.step, self.choice)

    @property
    def stop_token_sampled(self) -> bool | None:
        """Whether the last id is the token that ended the turn; None if the engine does not report it."""
        return stop_token_sampled(self.choice)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A choice that gets a row, before its tokens are copied."""

    step: Step
    choice: Choice
    room: int | None = None  # the maximum length, None if it fits
    has_tokens: bool = True  # false if the engine returned no token ids

    @property
    def key(self) -> tuple[str, int]:
        return self.step.step_id, self.choice.index

    @property
    def count(self) -> int:
        """The number of sampled tokens in the row."""
        if not self.has_tokens or self.room is None:
            return len(self.choice.ids) if self.has_tokens else 0
        return max(0, min(len(self.choice.ids), self.room - len(self.step.prompts[self.choice.prompt])))

    @property
    def step_ids(self) -> tuple[str, ...]:
        return (self.step.step_id,) if self.count else ()


class TurnView(Format):
    """A format with one row for each turn."""

    cuts = False  # a turn can be cut to `max_len`
    keeps_empty = False  # it then has a row even if nothing sampled is left

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan a view of each turn, the oldest first; the turns of threads with a separate reward follow the others.

        Raises Inexpressible if the format cannot represent the rollout.
        """
        found = sequences(steps, facts, replace(options, max_len=None, row_weight="full"))
        self.check_branches(facts, options, found.branches)
        skipped = list(found.skipped)
        owned = {node.key: node for branch in found.branches for node in branch.owned_nodes}
        points = {
            node.key: point for branch in found.branches for point in [branch.point] for node in branch.owned_nodes
        }
        self.check_images(facts, (node.step for node in owned.values()))
        turns = [
            chosen for _, node in sorted(owned.items()) if (chosen := self._fit(node, options, skipped)) is not None
        ]
        live = [step for step in steps if options.trains(step)]
        bare = [_Chosen(step, choice, has_tokens=False) for step, choice in self.without_tokens(live)]
        lasts = {*{facts.rewarded(chosen.step.thread): chosen.key for chosen in turns}.values()}
        bare_logprobs = {step.step_id for step in steps if RETOKENIZED in step.problems or is_unlogged(step)}
        all_rows = sorted([*turns, *bare], key=lambda chosen: (facts.rewarded(chosen.step.thread) or "", chosen.key))
        threads = [chosen.step.thread for chosen in all_rows]
        row_facts = facts.of_rows(threads, split=options.row_weight == "split" and self.repeats_reward)
        source = RowSource(self.name, facts, {step.step_id: step for step in steps}, fill, len(found.branches) == 1)

        def rendered() -> Iterator[Any]:
            for chosen, of_row in zip(all_rows, map(source.of_row, row_facts), strict=True):
                if chosen.has_tokens and chosen.step.step_id in bare_logprobs:
                    raise source.refuse_unlogged(f"step {chosen.step.step_id!r}")
                if chosen.has_tokens:
                    yield self.turn(_sampled(chosen, is_last=chosen.key in lasts), of_row)
                else:
                    yield self.bare(chosen.step, chosen.choice, of_row)

        return Plan(
            [chosen.step_ids for chosen in all_rows],
            skipped_rows(skipped),
            rendered,
            threads=threads,
            points=[points.get(chosen.key) for chosen in all_rows],
            sampled=[Trained(chosen.step, chosen.choice, chosen.count) for chosen in turns],
        )

    @abstractmethod
    def turn(self, turn: TurnRow, source: RowSource) -> Any:
        """Render a turn in this format. Raises Inexpressible if the format cannot represent the turn."""

    def without_tokens(self, steps: Sequence[Step]) -> Iterable[tuple[Step, Choice]]:
        """Return the choices without token ids that have a row in this format; none by default."""
        return ()

    def bare(self, step: Step, choice: Choice, source: RowSource) -> Any:
        """Render a choice of `without_tokens`."""
        raise NotImplementedError

    def _fit(self, node: Node, options: Options, skipped: list[Skipped]) -> _Chosen | None:
        """Return the turn within `max_len`; None if it is skipped, which is added to `skipped`."""
        room = options.max_len
        if room is None or options.overlong == "keep" or node.end <= room:
            return _Chosen(node.step, node.choice)
        if self.cuts and options.overlong == "cut" and (self.keeps_empty or node.start < room):
            return _Chosen(node.step, node.choice, room)
        skipped.append(Skipped(node.step.step_id, f"longer than max_len={room}", len(node.choice.ids)))
        return None


def _sampled(chosen: _Chosen, *, is_last: bool) -> TurnRow:
    step, choice = chosen.step, chosen.choice
    prompt = step.prompts[choice.prompt].tolist()
    turn = TurnRow(step, choice, prompt, choice.ids.tolist(), choice.logprobs.tolist(), is_last)
    return turn if chosen.room is None else _cut(turn, chosen.room)


def _cut(turn: TurnRow, room: int) -> TurnRow:
    """Cut the turn as verifiers cuts to its `max_seq_len` (fa7f5fa): after a longer prompt, no sampled token remains."""
    if len(turn.prompt) > room:
        return replace(turn, prompt=turn.prompt[:room], ids=[], logprobs=[], cut=True, overlong_prompt=True)
    left = room - len(turn.prompt)
    return replace(turn, ids=turn.ids[:left], logprobs=turn.logprobs[:left], cut=True)


def step_reward(step: Step, source: RowSource) -> float:
    """Return the step's reward, or else the rollout's. Raises MissingReward."""
    reward = reward_of(step, source.facts)
    return source.reward() if reward is None else reward


def reward_of(step: Step, facts: RolloutFacts) -> float | None:
    """Return the step's reward, or else the rollout's, if there is one."""
    own = facts.step_reward(step.step_id)
    return facts.reward if own is None else own


def prompt_fill(source: RowSource) -> float:
    """Return the value for the logprob of a prompt token."""
    return 0.0 if source.fill.prompt_logprob is None else source.fill.prompt_logprob
