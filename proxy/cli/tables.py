"""Tables of rollouts, groups, policies and engines that fit a given width by omitting the least important columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from proxy.cli.console import COLUMN_GAP, new_table, visible
from proxy.clock import SystemClock

_STYLES: Final = {
    "open": "cyan", "completed": "green", "complete": "green", "failed": "red", "aborted": "red", "dropped": "red",
    "limited": "yellow", "truncated": "yellow", "claimed": "magenta",
}  # fmt: skip
MIN_ID_WIDTH = 12  # cells; narrower IDs are avoided by omitting a column
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def number(value: float | None) -> str:
    """Format a number; None is empty."""
    return "" if value is None else f"{value:g}"


def drift(kinds: Mapping[str, int] | None) -> str:
    """Format the drift counts by kind."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted((kinds or {}).items()))


def age(since_ms: int) -> str:
    """Format the time since a Unix time in its largest unit."""
    seconds = max(SystemClock().now_ms() - since_ms, 0) // 1000
    return next((f"{seconds // unit} {name}" for unit, name in _AGES if seconds >= unit), "now")


def status_style(status: str) -> str:
    """Return the style of a status."""
    return _STYLES.get(status, "")


def _status(row: Mapping[str, Any]) -> Text:
    return Text(visible(row["status"]), status_style(row["status"]))


def _pause(row: Mapping[str, Any]) -> Text:
    if row["mode"] is None:
        return Text("sent")
    return Text({"wait": "wait", "reject": "rejected"}.get(row["mode"], visible(row["mode"])), "yellow")


def _engine_state(row: Mapping[str, Any]) -> Text:
    if row["healthy"]:
        return Text("healthy", "green")
    return Text("ejected" if row["ejected_until"] else "UNREACHABLE", "red")


def _warning(count: int, style: str) -> Text:
    return Text(str(count), style if count else "")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its cell for a row, and its rank of omission: the highest is omitted first, 0 never."""

    name: str
    cell: Callable[[Mapping[str, Any]], Text | str | int | None]
    rank: int = 0
    is_number: bool = False


# The columns of each kind of objects in responses; `members` are the rollouts of a group.
TABLES: Final = {
    "rollouts": (
        Column("rollout", lambda row: row["rollout_id"]),
        Column("group", lambda row: row["group_id"], 3),
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: row["counts"]["steps"], 1, is_number=True),
        Column("exact", lambda row: row["counts"]["exact"], 5, is_number=True),
        Column("flagged", lambda row: _warning(row["counts"]["flagged"], "yellow"), 2, is_number=True),
        Column("error", lambda row: _warning(row["counts"]["error"], "red"), 6, is_number=True),
        Column("tokens", lambda row: row["counts"]["sampled_tokens"], 4, is_number=True),
        Column("drift", lambda row: drift(row["drift"]), 7),
        Column("age", lambda row: age(row["created_ms"]), 8, is_number=True),
    ),
    "groups": (
        Column("group", lambda row: row["group_id"]),
        Column("status", _status),
        Column("finished", lambda row: f"{row['finished']}/{row['members']}", 1, is_number=True),
        Column("size", lambda row: number(row["size"]), 4, is_number=True),
        Column("policy", lambda row: row["policy_version"], 3),
        Column("consumer", lambda row: row.get("consumer") or row.get("why"), 2),
        Column("age", lambda row: age(row["created_ms"]), 5, is_number=True),
    ),
    "members": (
        Column("rollout", lambda row: row["rollout_id"]),
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: row["steps"], 2, is_number=True),
        Column("flagged", lambda row: _warning(row["flagged"], "yellow"), 4, is_number=True),
        Column("drift", lambda row: drift(row["drift"]), 5),
        Column("ended by", lambda row: row.get("reason"), 6),
        Column("replaced by", lambda row: row.get("replaced_by"), 3),
    ),
    "policies": (
        Column("policy", lambda row: row["name"]),
        Column("version", lambda row: row["version"]),
        Column("epoch", lambda row: row.get("epoch") or None, 3, is_number=True),
        Column("new calls", _pause),
        Column("trained", lambda row: "yes" if row["train"] else "no", 1),
        Column("models", lambda row: ", ".join(row["models"]), 2),
    ),
    "engines": (
        Column("engine", lambda row: row["name"]),
        Column("state", _engine_state),
        Column("kind", lambda row: row["kind"], 1),
        Column("version", lambda row: row["version"], 4),
        Column("in flight", lambda row: row["in_flight"], 2, is_number=True),
        Column("queued", lambda row: row["queued"], 3, is_number=True),
        Column("faults", lambda row: _warning(row["faults"], "yellow"), 5, is_number=True),
        Column("models", lambda row: ", ".join(row["models"]), 6),
        Column("url", lambda row: row["url"], 7),
        Column("last failure", lambda row: row["last_fault"], 8),
    ),
}


def table(noun: str, rows: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """Return a table of these objects, and the names of the omitted columns."""
    columns = TABLES[noun]
    cells = {column: [_cell(column.cell(row)) for row in rows] for column in columns}
    widths = {
        column: max(cell_len(str(cell)) for cell in (column.name, *values)) if column.rank else MIN_ID_WIDTH
        for column, values in cells.items()
    }
    kept = list(columns)
    while sum(widths[column] + COLUMN_GAP for column in kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    made = new_table((column.name, column.is_number, column.rank > 0) for column in kept)
    for row in zip(*(cells[column] for column in kept), strict=True):
        made.add_row(*row)
    return made, [column.name for column in columns if column not in kept]


def _cell(value: Text | str | int | None) -> Text:
    """Return the text of a cell, which is never parsed as markup."""
    return value if isinstance(value, Text) else Text("" if value is None else visible(value))
