"""The interface of export formats.

Contains the `Format` protocol, its results, and the two ways to combine the rows of a group. A format is a pure view: the
same rollout gives the same rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, Skipped
from proxy.trajectory.step import Step

# Recursive types are not written before Python 3.12's `type`.
Column: TypeAlias = "str | list[Column] | dict[str, Column]"
Columns: TypeAlias = "Mapping[str, Column]"

TEXT: Final = "text"
JSON: Final = "json"  # whatever people gave, as JSON text: rows of one column must be of one type, and these are not
FLAG: Final = "bool"
BIT: Final = "int8"
ID: Final = "int32"
COUNT: Final = "int64"
LOGPROB: Final = "float32"
REWARD: Final = "float64"

IDS: Final[list[Column]] = [ID]
BITS: Final[list[Column]] = [BIT]
LOGPROBS: Final[list[Column]] = [LOGPROB]


class Inexpressible(ValueError):
    """A format cannot say this without bending it; the message says what, of which rollout, and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows that a rollout will have, before they are rendered.

    `trained` has an entry for each row: the ids of the steps whose sampled tokens are trained in that row (none for a row
    that trains nothing). `skipped` names the steps that are trained in no row. `render` makes the rows one at a time, in
    the same order, so that only one of them is in memory; it raises `Inexpressible` at a row that the format cannot express.
    """

    trained: Sequence[tuple[str, ...]]
    skipped: list[dict[str, str]]
    render: Callable[[], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """JSON-ready rows of one rollout; `trained` and `skipped` are those of its `Plan`.

    A row is an object; `prime_rl`'s is an array.
    """

    rows: list[Any]
    skipped: list[dict[str, str]]
    trained: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """What a view puts where nothing was recorded.

    `prompt_logprob` stands where nothing was sampled, instead of the format's own value. `pad_id` and the two lengths are
    for formats that pad. `decode` makes text of ids, where a tokenizer is at hand.
    """

    prompt_logprob: float | None = None
    pad_id: int = 0
    prompt_length: int | None = None
    response_length: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None


PLAIN: Final = Fill()


class Format(Protocol):
    """One export format.

    `whole` says whether its steps must come with their requests and responses; `columns` are the types of a row's fields,
    in order, for containers that have types.
    """

    name: str
    whole: bool
    columns: ClassVar[Columns]

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Choose the rows of one rollout. Raises `Inexpressible` for a rollout that the format cannot express."""
        ...

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Rows:
        """Render all rows of one rollout. Raises `Inexpressible` for a rollout that the format cannot express."""
        ...

    def order(self, members: Sequence[Rows]) -> list[tuple[int, int]]:
        """Return (member, row of that member) for each entry of what `gather` makes of these members, in its order."""
        ...

    def gather(self, members: Sequence[Rows]) -> Any:
        """Combine a whole group into the one JSON-ready value that the trainer takes.

        `members` are the results of `rows` for each rollout of the group, in the group's order. The number of a rollout
        within its group is written here. Changes no row that it is given. Raises `Inexpressible` for members that cannot
        be combined.
        """
        ...

    def flat(self, entry: Any) -> list[Any]:
        """Return the rows in one entry of the list that `gather` made, for containers that hold rows only."""
        ...


class Planned(ABC):
    """A format that renders its rows one at a time, from a plan."""

    @abstractmethod
    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Choose the rows of one rollout. Raises `Inexpressible` for a rollout that the format cannot express."""

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Rows:
        """Render all rows of one rollout. Raises `Inexpressible` for a rollout that the format cannot express."""
        plan = self.plan(facts, steps, options, fill)
        return Rows(list(plan.render()), plan.skipped, plan.trained)


class Listed:
    """A format whose group is the list of all its rows."""

    whole = False

    def order(self, members: Sequence[Rows]) -> list[tuple[int, int]]:
        """Return (member, row of that member) for each entry of what `gather` makes of these members, in its order."""
        return [(number, at) for number, member in enumerate(members) for at in range(len(member.rows))]

    def gather(self, members: Sequence[Rows]) -> Any:
        """List all rows, member by member."""
        return [self.numbered(members[number].rows[at], number) for number, at in self.order(members)]

    def flat(self, entry: Any) -> list[Any]:
        """Return the entry, which is a row."""
        return [entry]

    def numbered(self, row: Any, member: int) -> Any:
        """Return the row with the number of its member within the group."""
        return row


class Batched(Listed):
    """A format whose rows are batches of one: an object of lists, with one entry in each."""

    name: str

    def gather(self, members: Sequence[Rows]) -> Any:
        """Make one batch: each list is the lists of all rows, one after the other."""
        rows = super().gather(members)
        if len({frozenset(key for key in row if row[key] is not None) for row in rows}) > 1:
            odd = sorted({key for row in rows for key in row if any(other.get(key) is None for other in rows)})
            raise Inexpressible(f"{self.name} wants the same of all rows, and some have no {' and no '.join(odd)}")
        if not rows:
            return {}
        return {
            key: None if value is None else [entry for row in rows for entry in row[key]]
            for key, value in rows[0].items()
        }


def skipped_rows(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    """What was left out, JSON-ready."""
    return [{"step_id": left.step_id, "why": left.why} for left in skipped]
