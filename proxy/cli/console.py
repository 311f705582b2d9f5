"""Where things are printed: what was asked for on standard output, notes on standard error.

Holds the two consoles, and the printing of tables, of lines and of JSON. rich leaves colours out where there is no terminal,
and where NO_COLOR says so.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TextIO
from unicodedata import category

import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

# Control, format (direction, zero width, tags), surrogate and line-breaking characters.
_OBEYED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = (
    "\u200c\u200d"  # join and part letters in many scripts, and make one emoji of several; they hide nothing
)
_BEYOND_ASCII: Final = re.compile("[^\\x00-\\x7e]")
_NAMES: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def visible(text: object) -> str:
    """The text on one line, with what a terminal would obey spelt out: `\\x1b` for an escape."""
    return "".join(map(_shown, str(text)))


def visible_lines(text: object) -> list[str]:
    """The same for a text of several lines; tabs become spaces."""
    return [visible(line) for line in str(text).expandtabs(4).split("\n")]


def visible_json(text: str) -> str:
    """JSON that means the same, with what a terminal would obey as JSON's own escapes; JSON itself spells out C0 only."""
    return _BEYOND_ASCII.sub(lambda found: _escaped(found[0]), text)


@lru_cache(1024)
def _escaped(character: str) -> str:
    if not _is_obeyed(character):
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _is_obeyed(character: str) -> bool:
    return character not in _JOINERS and category(character) in _OBEYED


def _shown(character: str) -> str:
    if not _is_obeyed(character):
        return character
    if character in _NAMES:
        return _NAMES[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_MARGIN: Final = 12  # as wide as the margin in which `step` names who wrote a message
_UNCUT: Final = 4096  # a file or a pipe has no width: nothing is cut or wrapped for it
_ALIGNED: Final = 40  # cells to which the columns of a piped table are padded; a longer cell moves its own line only
BESIDE: Final = 2  # cells between columns


class _Answers(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read has seen enough, as `head` does: no failure."""
        raise BrokenPipeError


def answers(file: TextIO | None = None) -> Console:
    """Where the answer goes: a terminal at its width, anything else uncut."""
    console = _Answers(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNCUT
    return console


def notes(*, quiet: bool = False) -> Console:
    """Where everything else goes; `quiet`: nowhere."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def new_table(columns: Iterable[tuple[str, bool, bool]]) -> Table:
    """An empty table of these columns: the name, whether it holds numbers, and whether its cells are never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, BESIDE, 0, 0), header_style="bold")
    for name, is_number, is_whole in columns:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_whole, overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table: fitted into a terminal; elsewhere each row on one line, without blanks at its end."""
    if out.is_terminal:
        out.print(table)
        return
    cells = [[Text(str(cell)) for cell in (column.header, *column.cells)] for column in table.columns]
    for column, texts in zip(table.columns, cells, strict=True):
        width = max((text.cell_len for text in texts if text.cell_len <= _ALIGNED), default=0)
        for text in texts:
            missing = max(width - text.cell_len, 0)
            text.pad_left(missing) if column.justify == "right" else text.pad_right(missing)
    print_lines(out, (Text(" " * BESIDE).join(row) for row in zip(*cells, strict=True)))


def print_lines(out: Console, lines: Iterable[Text], indent: int = _MARGIN) -> None:
    """Print lines; what a terminal has no room for goes on below, indented. Elsewhere no line has blanks at its end."""
    for line in lines:
        if not out.is_terminal:
            line.rstrip()
        if not out.is_terminal or line.cell_len <= out.width:
            out.print(line, soft_wrap=True)
            continue
        first, *rest = line.divide([indent])
        told = [part for each in rest for part in each.wrap(out, max(out.width - indent, 1), overflow="fold")]
        out.print(first.append_text(told[0]) if told else first, soft_wrap=True)
        for more in told[1:]:
            out.print(Text(" " * indent).append_text(more), soft_wrap=True)


def print_json(value: Any, *, lines: bool = False) -> None:
    """One JSON document on standard output; with `lines` on a line of its own, there at once."""
    option = orjson.OPT_APPEND_NEWLINE | (0 if lines else orjson.OPT_INDENT_2)
    sys.stdout.write(visible_json(orjson.dumps(value, option=option).decode()))
    sys.stdout.flush()


def complain(sentence: str) -> None:
    """Say on standard error what was wrong."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    console.print(Text.assemble(("tokentape:", "bold red"), " ", "\n".join(visible_lines(sentence))), soft_wrap=True)


def remark(sentence: str, style: str = "") -> None:
    """Say something on standard error beside the answer."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    console.print(Text(visible(sentence), style), soft_wrap=True)


Export = Callable[[int, int], None]
Audit = Callable[[bool], None]


@contextmanager
def export_bar(notes: Console, rollouts: int) -> Iterator[Export]:
    """What is called with the bytes that came and the rollouts that they ended; 0 `rollouts`: nobody knows how many."""
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), MofNCompleteColumn(), TextColumn("rollouts")] if rollouts else []
    with _show_progress(notes, *columns, TextColumn("{task.fields[size]}"), TimeElapsedColumn()) as progress:
        task = progress.add_task("exporting", total=rollouts or None, size="")
        came = 0

        def moved(read: int, done: int) -> None:
            nonlocal came
            came += read
            progress.update(task, advance=done, size=_size(came))

        yield moved


@contextmanager
def audit_bar(notes: Console, sequences: int | None) -> Iterator[Audit]:
    """What is called with whether a sequence is aligned; None `sequences`: nobody knows how many."""
    bar = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()] if sequences is not None else [TimeElapsedColumn()]
    with _show_progress(notes, SpinnerColumn(), TextColumn("{task.description}"), *bar) as progress:
        task = progress.add_task("auditing", total=sequences)
        audited = aligned = 0

        def seen(is_aligned: bool) -> None:  # noqa: FBT001 - one fact, told as it is
            nonlocal audited, aligned
            audited, aligned = audited + 1, aligned + is_aligned
            progress.update(task, advance=1, description=f"audited {audited}, {aligned} of them aligned")

        yield seen


def _show_progress(notes: Console, *columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=notes, transient=True, disable=notes.quiet or not notes.is_terminal)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
