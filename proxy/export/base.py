"""The base class of export formats, its results, and the two ways to combine the rows of a group.

A format is a pure view: the same rollout gives the same rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.images import recorded
from proxy.trajectory.ratios import Recorded, Trained, tally
from proxy.trajectory.sequence import Branch, BranchPoint, Options, Role, Scores, Skipped
from proxy.trajectory.step import Step

# Recursive type aliases need quotes before Python 3.12.
Column: TypeAlias = "str | list[Column] | dict[str, Column]"
Columns: TypeAlias = "Mapping[str, Column]"
RewardUse: TypeAlias = Literal["optional", "uniform", "required"]
RowsPerRollout: TypeAlias = Literal["all", "one"]
Place: TypeAlias = Literal["none", "rollout", "turn", "token"]

TEXT: Final = "text"
JSON: Final = "json"  # values of any type, as JSON text: a column must have one type
FLAG: Final = "bool"
BIT: Final = "int8"
ID: Final = "int32"
COUNT: Final = "int64"
LOGPROB: Final = "float32"
REWARD: Final = "float64"

IDS: Final[list[Column]] = [ID]
BITS: Final[list[Column]] = [BIT]
LOGPROBS: Final[list[Column]] = [LOGPROB]
REFERENCES: Final[list[Column]] = [TEXT]  # to images


class Inexpressible(ValueError):
    """A format cannot represent a rollout; the message has the rollout, the reason and a remedy, `code` its kind."""

    code: ClassVar[str] = "format"


class Forked(Inexpressible):
    """The rollout has several sequences where one is required."""

    code = "forked"


class MissingReward(Inexpressible):
    """The rollout has no reward where one is required."""

    code = "no_reward"


class MissingAdvantage(Inexpressible):
    """The rollout has no advantage where one is required."""

    code = "no_advantage"


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of a rollout, before they are rendered."""

    trained: Sequence[tuple[str, ...]]  # for each row, the ids of the steps that it trains
    skipped: list[dict[str, Any]]  # the steps that no row trains
    # Yields the rows in this order, one at a time; raises `Inexpressible` at a row that the format cannot represent.
    render: Callable[[], Iterator[Any]]
    # The same for columnar containers, with arrays of ids (`array`), masks (`bytearray`) and logprobs (`Floats`).
    pack: Callable[[], Iterator[Any]] | None = None
    rescored: Sequence[Mapping[str, Any]] = ()  # what scored each row, if rows have scores
    threads: Sequence[str | None] = ()  # of each row; empty if threads are unknown
    points: Sequence[
        BranchPoint | None
    ] = ()  # where each row leaves what its rollout inherited; empty if that is unknown
    sampled: Sequence[Trained] = ()  # what all rows train; empty for formats without rows for trainers


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one rollout as JSON values, with the other fields of its `Plan`."""

    rows: list[Any]  # objects; arrays for `prime_rl`
    skipped: list[dict[str, Any]]
    trained: Sequence[tuple[str, ...]] = ()
    rescored: Sequence[Mapping[str, Any]] = ()
    threads: Sequence[str | None] = ()
    points: Sequence[BranchPoint | None] = ()
    recorded: Mapping[Recorded, int] = field(
        default_factory=dict
    )  # the number of trained tokens, by how they were recorded


def rows_of(plan: Plan) -> Rows:
    """Render all rows of a plan. Raises Inexpressible."""
    rows = list(plan.render())
    return Rows(rows, plan.skipped, plan.trained, plan.rescored, plan.threads, plan.points, tally(plan.sampled))


@dataclass(frozen=True, slots=True)
class Fill:
    """Values for what is not recorded.

    `prompt_logprob` replaces the format's own value for tokens that were not sampled. `pad_id` and the two lengths are
    for formats that pad. `decode` returns the text of ids, if a tokenizer is configured. `scores` are the requested scores by
    row number, and `role` is what they are for.
    """

    prompt_logprob: float | None = None
    pad_id: int = 0
    prompt_length: int | None = None
    response_length: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    scores: Sequence[Scores] = ()
    role: Role = "teacher"


PLAIN: Final = Fill()


class Format(ABC):
    """One export format, which renders its rows one at a time, from a plan. A group is the list of all its rows."""

    name: str
    whole = False  # its steps need their requests and responses
    columns: ClassVar[Columns]  # the types of a row's fields, in order, for typed containers
    # Whether each rollout needs a reward, unless its steps have the rewards that the rows need; `uniform`: or all rollouts of a
    # group if one has a reward.
    reward: ClassVar[RewardUse] = "optional"
    branches: ClassVar[RowsPerRollout] = "all"  # `one` if the trainer takes one row for each rollout
    by_thread: ClassVar[bool] = False  # its steps have their threads
    repeats_reward: ClassVar[bool] = True  # false if only one row of a rollout has its reward
    # The smallest unit with a place in its rows for its own reward, and for its own advantage.
    reward_place: ClassVar[Place] = "rollout"
    advantage_place: ClassVar[Place] = "none"
    # The columns of scores and of the most likely tokens, by the role of the scores; none if the rows have no place for them.
    scored: ClassVar[Mapping[Role, Columns]] = {}
    likely: ClassVar[Mapping[Role, Columns]] = {}
    has_images: ClassVar[bool] = False  # its rows have images
    pads: ClassVar[Sequence[str]] = ()  # the parameters that it requires, because it pads its rows

    def check_images(self, facts: RolloutFacts, steps: Iterable[Step]) -> None:
        """Raise Inexpressible for calls with images if the format cannot represent them: without them the prompt is another."""
        count = 0 if self.has_images else max((len(recorded(step)) for step in steps), default=0)
        if count:
            raise Inexpressible(
                f"Format {self.name!r} has no place for images; rollout {facts.rollout_id!r} has {count}. Use a format with "
                "images, such as sequences."
            )

    def check_branches(self, facts: RolloutFacts, options: Options, branches: Sequence[Branch]) -> None:
        """Raise Forked for a rollout with several sequences if the format requires one, or `branches` one of each thread."""
        if len(branches) < 2 or "one" not in (self.branches, options.branches):
            return
        if self.branches != "one" and len({branch.thread for branch in branches}) == len(branches):
            return
        given = "" if self.branches == "one" else " with branches=one"
        policies = sorted({branch.policy for branch in branches})
        remedy = (
            "Use threads=main, branches=longest or branches=last, which drop the tokens of the others, or a format with "
            "several sequences."
            if len(policies) == 1
            else f"They are of the policies {', '.join(policies)}: export them one by one with policy=."
        )
        raise Forked(
            f"Format {self.name!r}{given} requires one sequence per rollout; rollout {facts.rollout_id!r} has {len(branches)} "
            f"sequences. {remedy}"
        )

    @abstractmethod
    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Choose the rows of one rollout. Raises Inexpressible if the format cannot represent the rollout."""

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Rows:
        """Render all rows of one rollout. Raises what `plan` and its rendering raise."""
        plan = self.plan(facts, steps, options, fill)
        return rows_of(plan)

    def order(self, members: Sequence[Rows]) -> list[tuple[int, int]]:
        """Return (member, row of that member) for each entry of the result of `gather`, in its order."""
        return [(number, index) for number, member in enumerate(members) for index in range(len(member.rows))]

    def gather(self, members: Sequence[Rows]) -> Any:
        """Combine a group into the one JSON value that the trainer accepts: here the list of all rows, by member.

        `members` are the results of `rows` for each rollout of the group, in the group's order. The input is not changed.
        Raises Inexpressible if the members cannot be combined.
        """
        return [self.numbered(members[number].rows[index], number) for number, index in self.order(members)]

    def flat(self, entry: Any) -> list[Any]:
        """Return the rows in one entry of the list that `gather` returned, for containers of rows."""
        return [entry]

    def numbered(self, row: Any, member: int) -> Any:
        """Return the row with the number of its member in the group."""
        return row


class Batched(Format):
    """A format with batches of one as rows: objects of lists with one entry."""

    def gather(self, members: Sequence[Rows]) -> Any:
        """Return one batch: each list is the concatenation of the lists of all rows."""
        rows = super().gather(members)
        if any("images" in row for row in rows):
            rows = [{**row, "images": row.get("images", [[]])} for row in rows]
        if len({frozenset(key for key in row if row[key] is not None) for row in rows}) > 1:
            keys = {key for row in rows for key in row}
            odd = sorted(key for key in keys if any(row.get(key) is None for row in rows))
            kind = MissingAdvantage if odd == ["advantages"] else Inexpressible
            raise kind(
                f"Format {self.name!r} requires the same fields in all rows; some have no {' and no '.join(odd)}."
            )
        if not rows:
            return {}
        return {
            key: None if value is None else [entry for row in rows for entry in row[key]]
            for key, value in rows[0].items()
        }


def extended(form: Format, more: Columns) -> Format:
    """Return the format with these columns added."""
    wider = copy(form)
    vars(wider)["columns"] = {**form.columns, **more}
    return wider


def with_columns(form: Format, role: Role, *, likely: bool) -> Format:
    """Return the format with the columns for scores added."""
    return extended(form, {**form.scored[role], **(form.likely[role] if likely else {})})


def skipped_rows(skipped: Sequence[Skipped]) -> list[dict[str, Any]]:
    """Return the skipped steps as JSON values."""
    return [
        {"step_id": left.step_id, "why": left.why}
        | ({"dropped_tokens": left.dropped_tokens} if left.dropped_tokens else {})
        for left in skipped
    ]
