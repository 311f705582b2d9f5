"""Views of a rollout turn by turn: formats whose rows are one prompt and what was sampled after it.

Holds which turns there are, those that canonical rows train, oldest first, and what `max_len` makes of them. Nothing is
joined, so no mask bridges anything, and a rollout of any shape has such rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.export.base import PLAIN, Fill, Rows, skipped_rows
from proxy.export.views import Source, owned_turns
from proxy.trajectory.fidelity import is_unlogged
from proxy.trajectory.retokenize import RETOKENIZED
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import Options, Skipped, sequences, stop_token_sampled
from proxy.trajectory.step import Choice, Step
from proxy.trajectory.tree import Node


@dataclass(frozen=True, slots=True)
class Sampled:
    """One prompt and what was sampled after it.

    `cut` says that `max_len` took something away, `overlong_prompt` that it took all that was sampled, and of the prompt.
    """

    step: Step
    choice: Choice
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    is_last: bool = False
    cut: bool = False
    overlong_prompt: bool = False

    @property
    def stop_token_sampled(self) -> bool | None:
        """Whether the last id is the token that ended the turn; None where the engine does not say."""
        return stop_token_sampled(Node(0, None, self.step, self.choice))


class TurnView(ABC):
    """A format with one row for each turn.

    `cuts` is set where a turn can be cut to `max_len`, `keeps_empty` where it has a row even if nothing sampled is left.
    """

    name: str
    cuts = False
    keeps_empty = False

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Rows:
        """A view of each turn, the oldest first. Raises `Inexpressible`."""
        found = sequences(steps, facts, replace(options, max_len=None))
        by_id = {step.step_id: step for step in steps}
        source = Source(self.name, facts, by_id, fill, alone=len(found.rows) == 1)
        keys = sorted((turn.step_id, turn.choice) for row in found.rows for turn in owned_turns(row))
        skipped = list(found.skipped)
        fitting = [
            turn
            for step_id, choice in keys
            if (turn := self._fit(_sampled(by_id[step_id], choice, source), options, skipped)) is not None
        ]
        if fitting:
            fitting[-1] = replace(fitting[-1], is_last=True)
        return Rows([self.turn(turn, source) for turn in fitting], skipped_rows(skipped))

    @abstractmethod
    def turn(self, turn: Sampled, source: Source) -> Any:
        """A turn in this format. Raises `Inexpressible`."""

    def _fit(self, turn: Sampled, options: Options, skipped: list[Skipped]) -> Sampled | None:
        """The turn within `max_len`; None if it is left out, which is noted."""
        room = options.max_len
        if room is None or options.overlong == "keep" or len(turn.prompt) + len(turn.ids) <= room:
            return turn
        if self.cuts and options.overlong == "cut" and (self.keeps_empty or len(turn.prompt) < room):
            return _cut(turn, room)
        skipped.append(Skipped(turn.step.step_id, f"longer than max_len={room}"))
        return None


def _cut(turn: Sampled, room: int) -> Sampled:
    """The turn cut as verifiers cuts to its `max_seq_len` (fa7f5fa): a longer prompt is cut and nothing sampled is left."""
    if len(turn.prompt) > room:
        return replace(turn, prompt=turn.prompt[:room], ids=[], logprobs=[], cut=True, overlong_prompt=True)
    left = room - len(turn.prompt)
    return replace(turn, ids=turn.ids[:left], logprobs=turn.logprobs[:left], cut=True)


def _sampled(step: Step, index: int, source: Source) -> Sampled:
    choice = next(choice for choice in step.choices if choice.index == index)
    if RETOKENIZED in step.problems or is_unlogged(step):
        raise source.refuse_unlogged(f"step {step.step_id!r}")
    return Sampled(step, choice, step.prompts[choice.prompt].tolist(), choice.ids.tolist(), choice.logprobs.tolist())


def step_reward(step: Step, source: Source) -> float:
    """The step's own reward, else the rollout's."""
    own = source.facts.step_reward(step.step_id)
    return source.reward() if own is None else own


def prompt_fill(source: Source) -> float:
    """What stands for the logprob of a prompt's token."""
    return 0.0 if source.fill.prompt_logprob is None else source.fill.prompt_logprob
