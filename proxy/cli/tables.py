"""Tables of rollouts, groups, policies and engines that fit a given width by omitting the least important columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from proxy.cli.console import COLUMN_GAP, new_table, visible

_STYLES: Final = {
    "open": "cyan", "completed": "green", "complete": "green", "failed": "red", "aborted": "red", "dropped": "red",
    "limited": "yellow", "truncated": "yellow", "claimed": "magenta",
}  # fmt: skip
MIN_ID_WIDTH = 12  # cells; narrower IDs are avoided by omitting a column
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its cell for a row, and its rank of omission: the highest is omitted first, 0 never."""

    name: str
    cell: Callable[[Mapping[str, Any]], str | Text]
    rank: int = 0
    is_number: bool = False


def rollouts_table(rollouts: Sequence[Mapping[str, Any]], width: int, now_ms: int) -> tuple[Table, list[str]]:
    """Return the rollouts as a table, and the names of the omitted columns."""
    columns = (
        Column("rollout", lambda row: visible(row["rollout_id"])),
        Column("group", lambda row: visible(row["group_id"] or ""), 3),
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: str(row["counts"]["steps"]), 1, is_number=True),
        Column("exact", lambda row: str(row["counts"]["exact"]), 5, is_number=True),
        Column("flagged", lambda row: _warning(row["counts"]["flagged"], "yellow"), 2, is_number=True),
        Column("error", lambda row: _warning(row["counts"]["error"], "red"), 6, is_number=True),
        Column("tokens", lambda row: str(row["counts"]["sampled_tokens"]), 4, is_number=True),
        Column("drift", lambda row: visible(drift(row["drift"])), 7),
        Column("age", lambda row: age(now_ms - row["created_ms"]), 8, is_number=True),
    )
    return _fit(columns, rollouts, width)


def groups_table(groups: Sequence[Mapping[str, Any]], width: int, now_ms: int) -> tuple[Table, list[str]]:
    """Return the groups as a table, and the names of the omitted columns."""
    columns = (
        Column("group", lambda row: visible(row["group_id"])),
        Column("status", _status),
        Column("finished", lambda row: f"{row['finished']}/{row['members']}", 1, is_number=True),
        Column("size", lambda row: number(row["size"]), 4, is_number=True),
        Column("policy", lambda row: visible(row["policy_version"] or ""), 3),
        Column("consumer", lambda row: visible(row.get("consumer") or row.get("why") or ""), 2),
        Column("age", lambda row: age(now_ms - row["created_ms"]), 5, is_number=True),
    )
    return _fit(columns, groups, width)


def members_table(rollouts: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """Return the rollouts of a group as a table, and the names of the omitted columns."""
    columns = (
        Column("rollout", lambda row: visible(row["rollout_id"])),
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: str(row["steps"]), 2, is_number=True),
        Column("flagged", lambda row: _warning(row["flagged"], "yellow"), 4, is_number=True),
        Column("drift", lambda row: visible(drift(row["drift"])), 5),
        Column("ended by", lambda row: visible(row.get("reason") or ""), 6),
        Column("replaced by", lambda row: visible(row.get("replaced_by") or ""), 3),
    )
    return _fit(columns, rollouts, width)


def policies_table(policies: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """Return the policies as a table, and the names of the omitted columns."""
    columns = (
        Column("policy", lambda row: visible(row["name"])),
        Column("version", lambda row: visible("" if row["version"] is None else row["version"])),
        Column("epoch", lambda row: str(row.get("epoch") or ""), 3, is_number=True),
        Column("new calls", lambda row: _pause(row["mode"])),
        Column("trained", lambda row: "yes" if row["train"] else "no", 1),
        Column("models", lambda row: visible(", ".join(row["models"])), 2),
    )
    return _fit(columns, policies, width)


def engines_table(engines: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """Return the engines as a table, and the names of the omitted columns."""
    columns = (
        Column("engine", lambda row: visible(row["name"])),
        Column("state", _engine_state),
        Column("kind", lambda row: visible(row["kind"]), 1),
        Column("version", lambda row: visible(row["version"] or ""), 4),
        Column("in flight", lambda row: str(row["in_flight"]), 2, is_number=True),
        Column("queued", lambda row: str(row["queued"]), 3, is_number=True),
        Column("faults", lambda row: _warning(row["faults"], "yellow"), 5, is_number=True),
        Column("models", lambda row: visible(", ".join(row["models"])), 6),
        Column("url", lambda row: visible(row["url"]), 7),
        Column("last failure", lambda row: visible(row["last_fault"] or ""), 8),
    )
    return _fit(columns, engines, width)


def number(value: float | None) -> str:
    """Format a number; None is empty."""
    return "" if value is None else f"{value:g}"


def drift(kinds: Mapping[str, int] | None) -> str:
    """Format the drift counts by kind."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted((kinds or {}).items()))


def age(ms: int) -> str:
    """Format a duration in its largest unit."""
    seconds = max(ms, 0) // 1000
    return next((f"{seconds // unit} {name}" for unit, name in _AGES if seconds >= unit), "now")


def status_style(status: str) -> str:
    """Return the style of a status."""
    return _STYLES.get(status, "")


def _status(row: Mapping[str, Any]) -> Text:
    return Text(visible(row["status"]), status_style(row["status"]))


def _pause(mode: str | None) -> Text:
    if mode is None:
        return Text("sent")
    return Text({"wait": "wait", "reject": "rejected"}.get(mode, visible(mode)), "yellow")


def _engine_state(row: Mapping[str, Any]) -> Text:
    if row["healthy"]:
        return Text("healthy", "green")
    return Text("ejected" if row["ejected_until"] else "UNREACHABLE", "red")


def _warning(count: int, style: str) -> Text:
    return Text(str(count), style if count else "")


def _fit(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    cells = {column: [column.cell(row) for row in rows] for column in columns}
    widths = {
        column: max(cell_len(str(cell)) for cell in (column.name, *values)) if column.rank else MIN_ID_WIDTH
        for column, values in cells.items()
    }
    kept = list(columns)
    while sum(widths[column] + COLUMN_GAP for column in kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    table = new_table((column.name, column.is_number, column.rank > 0) for column in kept)
    for row in zip(*(cells[column] for column in kept), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))  # never parsed as markup
    return table, [column.name for column in columns if column not in kept]
