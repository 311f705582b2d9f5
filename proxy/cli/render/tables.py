"""Rollouts and groups, a line each.

Holds the columns and their fitting into a width: what matters least goes first, and a note says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from proxy.cli.console import BESIDE, new_table, visible

_STYLES: Final = {
    "open": "cyan", "completed": "green", "complete": "green", "failed": "red", "aborted": "red", "dropped": "red",
    "limited": "yellow", "truncated": "yellow", "claimed": "magenta",
}  # fmt: skip
_SHORTEST_ID = 12  # cells to which an id may be folded before a column goes
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, what a row has there, and how soon it goes where there is no room (0: never)."""

    name: str
    cell: Callable[[Mapping[str, Any]], str | Text]
    goes: int = 0
    is_number: bool = False


def rollouts_table(rollouts: Sequence[Mapping[str, Any]], width: int, now_ms: int) -> tuple[Table, list[str]]:
    """The rollouts as a table that fits, and the names of the columns that did not."""
    columns = (
        Column("rollout", lambda row: visible(row["rollout_id"])),
        Column("group", lambda row: visible(row["group_id"] or ""), 3),
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: str(row["counts"]["steps"]), 1, is_number=True),
        Column("exact", lambda row: str(row["counts"]["exact"]), 5, is_number=True),
        Column("flagged", lambda row: _alarming(row["counts"]["flagged"], "yellow"), 2, is_number=True),
        Column("error", lambda row: _alarming(row["counts"]["error"], "red"), 6, is_number=True),
        Column("sampled", lambda row: str(row["counts"]["sampled_tokens"]), 4, is_number=True),
        Column("drift", lambda row: visible(drift(row["drift"])), 7),
        Column("age", lambda row: age(now_ms - row["created_ms"]), 8, is_number=True),
    )
    return _fitted(columns, rollouts, width)


def groups_table(groups: Sequence[Mapping[str, Any]], width: int, now_ms: int) -> tuple[Table, list[str]]:
    """The groups likewise."""
    columns = (
        Column("group", lambda row: visible(row["group_id"])),
        Column("status", _status),
        Column("finished", lambda row: f"{row['finished']}/{row['members']}", 1, is_number=True),
        Column("size", lambda row: number(row["size"]), 4, is_number=True),
        Column("policy", lambda row: visible(row["policy_version"] or ""), 3),
        Column("held by", lambda row: visible(row.get("consumer") or row.get("why") or ""), 2),
        Column("age", lambda row: age(now_ms - row["created_ms"]), 5, is_number=True),
    )
    return _fitted(columns, groups, width)


def number(value: float | None) -> str:
    """A number as people read it; nothing for none."""
    return "" if value is None else f"{value:g}"


def drift(kinds: Mapping[str, int] | None) -> str:
    """Drift by kind, as it is counted when a rollout is finished."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted((kinds or {}).items()))


def age(ms: int) -> str:
    """A length of time, by its largest unit."""
    seconds = max(ms, 0) // 1000
    return next((f"{seconds // unit} {name}" for unit, name in _AGES if seconds >= unit), "now")


def status_style(status: str) -> str:
    """The colour of a status."""
    return _STYLES.get(status, "")


def _status(row: Mapping[str, Any]) -> Text:
    return Text(visible(row["status"]), status_style(row["status"]))


def _alarming(count: int, style: str) -> Text:
    return Text(str(count), style if count else "")


def _fitted(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    cells = {column: [column.cell(row) for row in rows] for column in columns}
    needs = {
        column: max(map(_cells, [column.name, *filled])) if column.goes else _SHORTEST_ID
        for column, filled in cells.items()
    }
    kept = list(columns)
    while sum(needs[column] + BESIDE for column in kept) > width and any(column.goes for column in kept):
        kept.remove(max(kept, key=lambda column: column.goes))
    table = new_table((column.name, column.is_number, column.goes > 0) for column in kept)
    for place in range(len(rows)):
        table.add_row(*(_text(cells[column][place]) for column in kept))
    return table, [column.name for column in columns if column not in kept]


def _cells(shown: str | Text) -> int:
    return cell_len(str(shown))


def _text(shown: str | Text) -> Text:
    return shown if isinstance(shown, Text) else Text(shown)  # never read as markup
