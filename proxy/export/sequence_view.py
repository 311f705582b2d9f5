"""Formats with one row for each sequence, and what they have in common: filled logprobs, rewards, advantages, versions.

No value is invented: if a rollout lacks a required value, the format refuses the rollout with the reason.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from proxy.export.base import PLAIN, Fill, Format, Inexpressible, MissingAdvantage, MissingReward, Plan, skipped_rows
from proxy.trajectory.facts import RolloutFacts, number_of
from proxy.trajectory.images import PlacedImage, block_of, recorded
from proxy.trajectory.ratios import Trained
from proxy.trajectory.sequence import Options, Row, Scores, SequenceSpan, sequences
from proxy.trajectory.step import Step


@dataclass(frozen=True, slots=True)
class RowSource:
    """The context of a row."""

    name: str
    facts: RolloutFacts
    steps: Mapping[str, Step]  # by id
    fill: Fill
    alone: bool = True  # the row is the only one of its rollout

    def of_row(self, facts: RolloutFacts) -> "RowSource":
        """Return the context of a row with these facts."""
        return self if facts is self.facts else replace(self, facts=facts)

    def refuse(self, requirement: str, found: str, kind: type[Inexpressible] = Inexpressible) -> Inexpressible:
        """Return the exception that refuses this rollout."""
        return kind(f"Format {self.name!r} requires {requirement}; rollout {self.facts.rollout_id!r} has {found}.")

    def refuse_unlogged(self, what: str) -> Inexpressible:
        """Return the exception for sampled tokens without logprobs."""
        return self.refuse(
            "the logprob of each sampled token",
            f"none for {what}: they were not requested (record.logprobs: off), or the ids were not sampled "
            "(include=retokenized). Formats `sequences` and `steps` export null for them",
        )

    def reward(self) -> float:
        """Return the rollout's reward. Raises Inexpressible if it has none."""
        if self.facts.reward is None:
            raise self.refuse("a reward", "none", MissingReward)
        return float(self.facts.reward)

    def group_number(self) -> int:
        """Return a number for the group; a rollout without a group is a group of one."""
        return id_number(self.facts.group_id or self.facts.rollout_id)

    def env_name(self) -> str:
        """Return the name of the environment from the metadata, which only the trainer knows.

        Raises Inexpressible if the metadata has none.
        """
        name = self.facts.metadata.get("env_name")
        if not isinstance(name, str) or not name:
            raise self.refuse("`env_name` in the metadata", "none")
        return name

    def version(self, step_id: str, version: str | None) -> int:
        """Return a policy version as the number that the format requires.

        Raises Inexpressible if it is not a number.
        """
        found = number_of(version)
        if found is None:
            raise self.refuse(
                "a number as policy version", f"{'none' if version is None else repr(version)} at step {step_id!r}"
            )
        return found


class SequenceView(Format):
    """A format with one row for each canonical row."""

    keeps_first = True  # false if the trainer drops the first position
    packs = False

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan a view of each canonical row, the oldest leaf's first.

        Raises Inexpressible if the format cannot represent the rollout.
        """
        found = sequences(steps, facts, options)
        by_id = {step.step_id: step for step in steps}
        source = RowSource(self.name, facts, by_id, fill, alone=len(found.branches) == 1)
        self.check_branches(facts, options, found.branches)
        self.check_images(facts, (branch.path[-1].step for branch in found.branches))
        if not self.keeps_first and any(node.start == 0 for branch in found.branches for node in branch.owned_nodes):
            raise source.refuse("a prompt before the first sampled token", "a sequence without one")
        packs = self.packs and not fill.scores and fill.prompt_logprob is None
        return Plan(
            [branch.step_ids for branch in found.branches],
            skipped_rows(found.skipped),
            lambda: (self._viewed(row, source.of_row(row.facts)) for row in found.each()),
            (lambda: (self.packed(row, source) for row in found.each())) if packs else None,
            rescored=[scores.described() for scores in fill.scores],
            threads=[branch.thread for branch in found.branches],
            points=[branch.point for branch in found.branches],
            sampled=[
                Trained(node.step, node.choice, len(node.choice.ids))
                for branch in found.branches
                for node in branch.owned_nodes
            ],
        )

    def _viewed(self, row: Row, source: RowSource) -> Any:
        scores = source.fill.scores
        view = self.view(row, source)
        return self.with_scores(view, row, source, scores[row.branch]) if scores else view

    @abstractmethod
    def view(self, row: Row, source: RowSource) -> Any:
        """Return the row in this format. Raises Inexpressible if the format cannot represent the row."""

    def packed(self, row: Row, source: RowSource) -> Any:
        """Return the row for `Plan.pack`, of a format that `packs`."""
        raise NotImplementedError

    def with_scores(self, view: Any, row: Row, source: RowSource, scores: Scores) -> Any:
        """Return the row with its scores: here in the only column of `scored`, 0.0 where nothing is trained."""
        (name,) = self.scored[source.fill.role]
        return {**view, name: self.placed(scores.filled(row.mask, 0.0), row)}

    def placed(self, logprobs: list[float], row: Row) -> list[Any]:
        """Return logprobs of all positions as a column of this format has them."""
        return logprobs


def filled_logprobs(row: Row, source: RowSource, fill: float = 0.0) -> list[float]:
    """Return the logprobs of all positions, with a fill value where nothing is trained."""
    value = fill if source.fill.prompt_logprob is None else source.fill.prompt_logprob
    filled: list[float] = []
    for mask, logprob in zip(row.mask, row.logprobs, strict=True):
        if mask and logprob is None:
            raise source.refuse_unlogged("some sampled tokens")
        filled.append(value if logprob is None else logprob)
    return filled


def filled_likely(row: Row, scores: Scores) -> tuple[list[list[int]], list[list[float]]]:
    """Return the most likely ids of all positions and their logprobs, zeros where nothing is trained.

    Without them, the token itself is the only one.
    """
    width = max(1, scores.top_k)
    if scores.top_k:
        return scores.filled_top(row.mask, [0] * width)
    ids = [[token if bit else 0] for token, bit in zip(row.token_ids, row.mask, strict=True)]
    return ids, [[value] for value in scores.filled(row.mask, 0.0)]


def placed_json(images: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return the field of a row with these images; no field without images."""
    return {"images": [image._asdict() for image in images]} if images else {}


def references(row: Row, source: RowSource) -> list[str]:
    """Return for each image of a row the path at which TokenTape has it, or its URL if the engine fetched it."""
    rollout = quote(source.facts.rollout_id, safe="")
    names = recorded(source.steps[row.spans[-1].step_id])
    return [name if block_of(name) is None else f"/rollouts/{rollout}/images/{name}" for name in names]


def advantage_from(source: RowSource) -> float:
    """Return the rollout's only advantage, unchanged. Raises Inexpressible if it has none, or several."""
    advantages = source.facts.advantages
    if advantages is None:
        raise source.refuse("an advantage", "none", MissingAdvantage)
    if isinstance(advantages, int | float):
        return float(advantages)
    raise source.refuse("one advantage per rollout", "several")


def advantages_from(row: Row, source: RowSource) -> list[float]:
    """Return the advantage of each position, 0.0 where nothing is trained.

    A rollout's advantages are one number, a list with one for each position of its only row, or an object by step id of
    numbers or of lists with one for each sampled token.
    """
    advantages = source.facts.advantages
    if isinstance(advantages, Mapping):
        return _by_step(row, source, advantages)
    if isinstance(advantages, Sequence):
        if not source.alone or len(advantages) != len(row.token_ids):
            raise source.refuse(
                "a single sequence and one advantage for each of its tokens", "a list of advantages that does not match"
            )
        return [float(value) if mask else 0.0 for value, mask in zip(advantages, row.mask, strict=True)]
    value = advantage_from(source)
    return [value if mask else 0.0 for mask in row.mask]


def _by_step(row: Row, source: RowSource, advantages: Mapping[str, Any]) -> list[float]:
    filled = [0.0] * len(row.token_ids)
    for span in owned_turns(row):
        of_step = advantages.get(span.step_id)
        values = [of_step] * (span.end - span.start) if isinstance(of_step, int | float) else of_step
        if not isinstance(values, list) or len(values) != span.end - span.start:
            raise source.refuse(
                "an advantage for each sampled token", f"another number of advantages at step {span.step_id!r}"
            )
        filled[span.start : span.end] = map(float, values)
    return filled


@dataclass(frozen=True, slots=True)
class Turn:
    """The half-open range of a row that one choice sampled, possibly with several policy versions."""

    step_id: str
    choice: int
    start: int
    end: int
    spans: tuple[SequenceSpan, ...]


def turns(row: Row) -> list[Turn]:
    """Return the sampled ranges of a row, one for each choice on its path."""
    by_choice: dict[tuple[str, int], list[SequenceSpan]] = {}
    for span in row.spans:
        by_choice.setdefault((span.step_id, span.choice), []).append(span)
    return [Turn(*key, spans[0].start, spans[-1].end, tuple(spans)) for key, spans in by_choice.items()]


def owned_turns(row: Row) -> list[Turn]:
    """Return the turns that are trained in this row."""
    return [turn for turn in turns(row) if turn.spans[0].owned]


def id_number(*names: str) -> int:
    """Return a number for these ids, for trainers that identify rollouts and groups by numbers.

    It is the same in every process. It is below 2**53, so that every JSON parser keeps it exact. The probability that
    two of 10,000 ids share a number is 6e-9.
    """
    digest = blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 11


def owned_spans(row: Row) -> list[SequenceSpan]:
    """Return the spans that are trained in this row."""
    return [span for span in row.spans if span.owned]


def policy_versions_from(row: Row, source: RowSource) -> list[int]:
    """Return the policy versions that sampled what is trained here, as distinct numbers, ascending."""
    return sorted({source.version(span.step_id, span.policy_version) for span in owned_spans(row)})


def step_reward_ends(row: Row, source: RowSource) -> list[float]:
    """Return rewards by response token: a trained step's reward at its last token, unless it has rewards by token.

    The rollout's reward is at the last trained token, if the last step has none.
    """
    filled = [0.0] * (len(row.token_ids) - row.prompt_len)
    *_, last = found = owned_turns(row)
    for turn in found:
        start, end = turn.start - row.prompt_len, turn.end - row.prompt_len
        filled[start:end] = turn_rewards(turn.step_id, end - start, source, is_last=turn is last)
    return filled


def turn_rewards(step_id: str, count: int, source: RowSource, *, is_last: bool) -> list[float]:
    """Return the rewards of a turn's sampled tokens.

    If the last turn has none, the rollout's reward is at its last token.
    """
    one_by_one = token_rewards(step_id, count, source)
    if one_by_one is not None:
        return one_by_one
    own = source.facts.step_reward(step_id)
    at_end = source.reward() if own is None and is_last else own or 0.0
    return [*[0.0] * (count - 1), at_end]


def token_rewards(step_id: str, count: int, source: RowSource) -> list[float] | None:
    """Return the rewards of a step's sampled tokens; None if it has no rewards by token."""
    one_by_one = source.facts.token_rewards(step_id)
    if one_by_one is None:
        return None
    if len(one_by_one) != count:
        raise source.refuse(
            "a reward for each sampled token", f"{len(one_by_one)} rewards for the {count} tokens of step {step_id!r}"
        )
    return list(map(float, one_by_one))
