"""Views of the canonical row: what trainers' formats have in common.

Holds how a rollout's rows become a format's rows, and the readings that several formats want: logprobs filled, rewards,
advantages, versions of the weights as numbers. What cannot be read so is refused with the reason: nothing is made up.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from proxy.export.base import PLAIN, Fill, Inexpressible, Plan, Planned, skipped_rows
from proxy.trajectory.facts import RolloutFacts, number_of
from proxy.trajectory.sequence import Options, Row, SequenceSpan, sequences
from proxy.trajectory.step import Step


@dataclass(frozen=True, slots=True)
class RowSource:
    """What a view is made of beside its row: the steps by id, what to fill with, and whether the row has no siblings."""

    name: str
    facts: RolloutFacts
    steps: Mapping[str, Step]
    fill: Fill
    alone: bool = True

    def refuse(self, why: str) -> Inexpressible:
        """The refusal of this rollout, to be raised."""
        return Inexpressible(f"{self.name} cannot say rollout {self.facts.rollout_id!r}: {why}")

    def refuse_unlogged(self, what: str) -> Inexpressible:
        """The refusal of sampled tokens whose logprobs are not known."""
        return self.refuse(
            f"the logprobs of {what} are not known: nobody asked for them (record.logprobs: off), or nobody sampled its ids "
            "(include=retokenized); formats `sequences` and `steps` say null there"
        )

    def reward(self) -> float:
        """The rollout's reward."""
        if self.facts.reward is None:
            raise self.refuse("it has no reward, and the format must have one; give it one first")
        return float(self.facts.reward)

    def group_number(self) -> int:
        """Return a number for the group; a rollout without a group is one by itself."""
        return id_number(self.facts.group_id or self.facts.rollout_id)

    def env_name(self) -> str:
        """The name of the environment, which nobody but the trainer knows."""
        name = self.facts.metadata.get("env_name")
        if not isinstance(name, str) or not name:
            raise self.refuse("it does not say its environment; set `env_name` in its metadata")
        return name

    def version(self, step_id: str, version: str | None) -> int:
        """A version of the weights as the number that the format wants."""
        found = number_of(version)
        if found is None:
            raise self.refuse(f"the policy version of step {step_id!r} is {version!r}, and the format wants a number")
        return found


class SequenceView(Planned):
    """A format with one row for each canonical row.

    `single` is set where the trainer takes one row of a rollout, `keeps_first` is unset where it drops the first position.
    """

    name: str
    single = False
    keeps_first = True

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan a view of each canonical row, the oldest leaf's first. Raises `Inexpressible`."""
        found = sequences(steps, facts, options)
        by_id = {step.step_id: step for step in steps}
        source = RowSource(self.name, facts, by_id, fill, alone=len(found.branches) == 1)
        if self.single and len(found.branches) > 1:
            raise source.refuse(
                f"it has {len(found.branches)} sequences, and the format one for each rollout; "
                "ask for branches=longest or branches=last, or for a format that has several"
            )
        if not self.keeps_first and any(node.start == 0 for branch in found.branches for node in branch.owned_nodes):
            raise source.refuse("its first token was sampled, and the format drops the first position")
        return Plan(
            [branch.step_ids for branch in found.branches],
            skipped_rows(found.skipped),
            lambda: (self.view(row, source) for row in found.each()),
        )

    @abstractmethod
    def view(self, row: Row, source: RowSource) -> Any:
        """The row in this format. Raises `Inexpressible`."""


def logprobs_of(row: Row, source: RowSource, fill: float = 0.0) -> list[float]:
    """The logprobs of all positions, with a fill where nothing is trained."""
    value = fill if source.fill.prompt_logprob is None else source.fill.prompt_logprob
    told: list[float] = []
    for mask, logprob in zip(row.mask, row.logprobs, strict=True):
        if mask and logprob is None:
            raise source.refuse_unlogged("some of its sampled tokens")
        told.append(value if logprob is None else logprob)
    return told


def advantage_of(source: RowSource) -> float:
    """The one advantage of the rollout, as given."""
    given = source.facts.advantages
    if given is None:
        raise source.refuse("it has no advantage, and the format must have one; give it one, or ask for one")
    if isinstance(given, int | float):
        return float(given)
    raise source.refuse("it has several advantages, and the format one for each rollout")


def advantages_of(row: Row, source: RowSource) -> list[float]:
    """The advantage of each position, 0.0 where nothing is trained.

    Given may be one number for the rollout, a list with one for each position of its only row, or an object by step id of
    numbers or of lists with one for each sampled token.
    """
    given = source.facts.advantages
    if isinstance(given, Mapping):
        return _by_step(row, source, given)
    if isinstance(given, Sequence):
        if not source.alone or len(given) != len(row.token_ids):
            raise source.refuse("its advantages are a list that is not one for each position of its only sequence")
        return [float(value) if mask else 0.0 for value, mask in zip(given, row.mask, strict=True)]
    value = advantage_of(source)
    return [value if mask else 0.0 for mask in row.mask]


def _by_step(row: Row, source: RowSource, given: Mapping[str, Any]) -> list[float]:
    told = [0.0] * len(row.token_ids)
    for span in owned_turns(row):
        of_step = given.get(span.step_id)
        values = [of_step] * (span.end - span.start) if isinstance(of_step, int | float) else of_step
        if not isinstance(values, list) or len(values) != span.end - span.start:
            raise source.refuse(f"the advantages of step {span.step_id!r} are not given for each of its sampled tokens")
        told[span.start : span.end] = map(float, values)
    return told


@dataclass(frozen=True, slots=True)
class Turn:
    """What one choice sampled in a row, half open; several versions of the weights may have."""

    step_id: str
    choice: int
    start: int
    end: int
    spans: tuple[SequenceSpan, ...]


def turns(row: Row) -> list[Turn]:
    """The sampled stretches of a row, one for each choice on its path."""
    by_choice: dict[tuple[str, int], list[SequenceSpan]] = {}
    for span in row.spans:
        by_choice.setdefault((span.step_id, span.choice), []).append(span)
    return [Turn(*key, spans[0].start, spans[-1].end, tuple(spans)) for key, spans in by_choice.items()]


def owned_turns(row: Row) -> list[Turn]:
    """Those that are trained in this row."""
    return [turn for turn in turns(row) if turn.spans[0].owned]


def id_number(*names: str) -> int:
    """Return a number for these ids, the same in every process: for trainers that tell rollouts and groups apart by numbers.

    It is below 2**53, so that each JSON reader keeps it exact. Two of 10,000 ids share a number with a probability of 6e-9.
    """
    digest = blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 11


def versions_of(row: Row, source: RowSource) -> list[int]:
    """The versions of the weights that sampled what is trained here, as numbers, each once, the oldest first."""
    return sorted({source.version(span.step_id, span.policy_version) for span in row.spans if span.owned})


def step_reward_ends(row: Row, source: RowSource) -> list[float]:
    """Rewards by response token: a step's own at its last token, unless it was given them token by token.

    The rollout's is at the last token of all, if the last step has none of its own.
    """
    told = [0.0] * (len(row.token_ids) - row.prompt_len)
    *_, last = found = turns(row)
    for turn in found:
        start, end = turn.start - row.prompt_len, turn.end - row.prompt_len
        told[start:end] = turn_rewards(turn.step_id, end - start, source, is_last=turn is last)
    return told


def turn_rewards(step_id: str, count: int, source: RowSource, *, is_last: bool) -> list[float]:
    """The rewards of a turn's sampled tokens; of the last turn without a reward of its own, the rollout's at its end."""
    one_by_one = source.facts.token_rewards(step_id)
    if one_by_one is None:
        own = source.facts.step_reward(step_id)
        at_end = source.reward() if own is None and is_last else own or 0.0
        return [*[0.0] * (count - 1), at_end]
    if len(one_by_one) != count:
        raise source.refuse(f"step {step_id!r} has {len(one_by_one)} rewards by token for {count} tokens")
    return list(map(float, one_by_one))
