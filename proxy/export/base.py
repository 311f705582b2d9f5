"""What every export format answers.

Holds the `Format` protocol, what it gives, and the two ways in which the rows of a group are put together. A format is a
pure view: the same rollout gives the same rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from proxy.export.columns import Columns
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import Options, Skipped
from proxy.trajectory.step import Step


class Inexpressible(ValueError):
    """A format cannot say this without bending it; the message says what, of which rollout, and what to do."""


@dataclass(frozen=True, slots=True)
class Rows:
    """JSON-ready rows of one rollout, and what no row came of. A row is an object; `prime_rl`'s is an array."""

    rows: list[Any]
    skipped: list[dict[str, str]]


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

    def rows(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Rows:
        """The rows of one rollout. Raises `Inexpressible` for a rollout that the format cannot say."""
        ...

    def gather(self, members: Sequence[Rows], place: int = 0) -> Any:
        """A whole group as the one JSON-ready object that the trainer takes.

        `members` are what `rows` gave for each rollout of the group, in the group's order; `place` is that of the group
        among the groups of a batch. Numbers of a rollout within its group and of the group are written here. Changes no
        row that it is given. Raises `Inexpressible` for members that cannot stand in one group.
        """
        ...


class Listed:
    """A format whose group is the list of all its rows."""

    whole = False

    def gather(self, members: Sequence[Rows], place: int = 0) -> Any:
        """All rows, member by member."""
        return [self.numbered(row, number, place) for number, member in enumerate(members) for row in member.rows]

    def numbered(self, row: Any, member: int, place: int) -> Any:
        """The row, told that it is of this member of the group at this place."""
        return row


class Batched:
    """A format whose rows are batches of one: an object of lists, with one entry in each."""

    whole = False
    name: str

    def gather(self, members: Sequence[Rows], place: int = 0) -> Any:
        """One batch: each list is the lists of all rows, one after the other."""
        rows = [self.numbered(row, number, place) for number, member in enumerate(members) for row in member.rows]
        if len({frozenset(key for key in row if row[key] is not None) for row in rows}) > 1:
            odd = sorted({key for row in rows for key in row if any(other.get(key) is None for other in rows)})
            raise Inexpressible(f"{self.name} wants the same of all rows, and some have no {' and no '.join(odd)}")
        if not rows:
            return {}
        return {
            key: None if value is None else [entry for row in rows for entry in row[key]]
            for key, value in rows[0].items()
        }

    def numbered(self, row: dict[str, Any], member: int, place: int) -> dict[str, Any]:
        """The row, told that it is of this member of the group at this place."""
        return row


def skipped_rows(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    """What was left out, JSON-ready."""
    return [{"step_id": left.step_id, "why": left.why} for left in skipped]
