"""Prints output to standard output and notes to standard error, with control characters escaped.

rich omits colors if the stream is not a terminal or NO_COLOR is set.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any, Final, TextIO
from unicodedata import category

import orjson
from rich.console import Console
from rich.filesize import decimal
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
_CONTROL: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"  # zero width (non-)joiners: needed by many scripts and emoji, harmless
_BEYOND_ASCII: Final = re.compile("[^\\x00-\\x7e]")
_NAMES: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def visible(text: object) -> str:
    """Return the text on one line with control characters escaped: `\\x1b` for ESC."""
    return "".join(map(_escaped, str(text)))


def visible_lines(text: object) -> list[str]:
    """Return the lines of a text, each escaped by `visible`; tabs become spaces."""
    return [visible(line) for line in str(text).expandtabs(4).split("\n")]


def visible_json(text: str) -> str:
    """Return equal JSON with all control characters as JSON escapes. JSON itself requires it for C0 only."""
    return _BEYOND_ASCII.sub(lambda match: _json_escaped(match[0]), text)


@lru_cache(1024)
def _json_escaped(character: str) -> str:
    if not _is_control(character):
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index]:02x}{units[index + 1]:02x}" for index in range(0, len(units), 2))


def _is_control(character: str) -> bool:
    return character not in _JOINERS and category(character) in _CONTROL


def _escaped(character: str) -> str:
    if not _is_control(character):
        return character
    if character in _NAMES:
        return _NAMES[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_DESCRIPTION: Final = TextColumn("{task.description}")
_MARGIN: Final = 12  # cells; the width of the role column in render/step.py
_NO_TERMINAL_WIDTH: Final = 4096  # cells; output to a file or pipe is not truncated or wrapped
_MAX_PADDED: Final = 40  # cells; columns of a piped table are padded up to this width
COLUMN_GAP: Final = 2  # cells


class _OutputConsole(Console):
    def on_broken_pipe(self) -> None:
        """Let `runner.run` handle a closed reader; rich would exit with 1."""
        raise BrokenPipeError


def output(file: TextIO | None = None) -> Console:
    """Return the console for standard output: as wide as the terminal, else without truncation."""
    console = _OutputConsole(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _NO_TERMINAL_WIDTH
    return console


def notes(*, quiet: bool = False) -> Console:
    """Return the console for standard error; `quiet` discards everything."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def new_table(columns: Iterable[tuple[str, bool, bool]]) -> Table:
    """Return an empty table. A column is its name, whether its cells are numbers, and whether they must not wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), header_style="bold")
    for name, is_number, no_wrap in columns:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=no_wrap, overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table, fitted to a terminal; otherwise each row is one line without trailing spaces."""
    if out.is_terminal:
        out.print(table)
        return
    cells = [[Text(str(cell)) for cell in (column.header, *column.cells)] for column in table.columns]
    for column, texts in zip(table.columns, cells, strict=True):
        width = max((text.cell_len for text in texts if text.cell_len <= _MAX_PADDED), default=0)
        for text in texts:
            missing = max(width - text.cell_len, 0)
            text.pad_left(missing) if column.justify == "right" else text.pad_right(missing)
    print_lines(out, (Text(" " * COLUMN_GAP).join(row) for row in zip(*cells, strict=True)))


def print_lines(out: Console, lines: Iterable[Text], indent: int = _MARGIN) -> None:
    """Print lines, wrapped and indented on a terminal; otherwise without wrapping and trailing spaces."""
    for line in lines:
        if not out.is_terminal:
            line.rstrip()
        if not out.is_terminal or line.cell_len <= out.width:
            out.print(line, soft_wrap=True)
            continue
        first, *rest = line.divide([indent])
        parts = [part for text in rest for part in text.wrap(out, max(out.width - indent, 1), overflow="fold")]
        out.print(first.append_text(parts[0]) if parts else first, soft_wrap=True)
        for part in parts[1:]:
            out.print(Text(" " * indent).append_text(part), soft_wrap=True)


def print_json(value: Any, *, lines: bool = False) -> None:
    """Print one JSON document to standard output, indented or, with `lines`, on one line; flush it."""
    option = orjson.OPT_APPEND_NEWLINE | (0 if lines else orjson.OPT_INDENT_2)
    sys.stdout.write(visible_json(orjson.dumps(value, option=option).decode()))
    sys.stdout.flush()


def print_error(message: str) -> None:
    """Print an error message to standard error."""
    _print_to_standard_error(Text.assemble(("tokentape:", "bold red"), " ", "\n".join(visible_lines(message))))


def print_note(message: str, style: str = "") -> None:
    """Print one line to standard error."""
    _print_to_standard_error(Text(visible(message), style))


def _print_to_standard_error(text: Text) -> None:
    Console(stderr=True, highlight=False, markup=False, emoji=False).print(text, soft_wrap=True)


ExportProgress = Callable[[int, int], None]


@contextmanager
def export_bar(notes: Console, rollouts: int) -> Iterator[ExportProgress]:
    """Show progress. Yield a function of received bytes and completed rollouts; `rollouts` 0 means an unknown total."""
    bar = [BarColumn(), MofNCompleteColumn(), TextColumn("rollouts")] if rollouts else []
    with _show_progress(
        notes, SpinnerColumn(), _DESCRIPTION, *bar, TextColumn("{task.fields[size]}"), TimeElapsedColumn()
    ) as progress:
        task = progress.add_task("exporting", total=rollouts or None, size="")
        received = 0

        def advance(count: int, done: int) -> None:
            nonlocal received
            received += count
            progress.update(task, advance=done, size=decimal(received))

        yield advance


@contextmanager
def audit_bar(notes: Console, sequences: int | None) -> Iterator[Callable[[bool], None]]:
    """Show progress. Yield a function of whether a sequence is aligned; `sequences` None means an unknown total."""
    bar = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()] if sequences is not None else [TimeElapsedColumn()]
    with _show_progress(notes, SpinnerColumn(), _DESCRIPTION, *bar) as progress:
        task = progress.add_task("auditing", total=sequences)
        audited = aligned = 0

        def advance(is_aligned: bool) -> None:  # noqa: FBT001 - the only argument
            nonlocal audited, aligned
            audited, aligned = audited + 1, aligned + is_aligned
            progress.update(task, advance=1, description=f"audited {audited} sequences, {aligned} aligned")

        yield advance


@contextmanager
def count_bar(notes: Console, what: str) -> Iterator[Callable[[], None]]:
    """Show how many of these are done. Yield a function to call for each."""
    with _show_progress(notes, SpinnerColumn(), _DESCRIPTION, TimeElapsedColumn()) as progress:
        task, numbers = progress.add_task(f"0 {what}", total=None), count(1)
        yield lambda: progress.update(task, description=f"{next(numbers)} {what}")


@contextmanager
def certify_bar(notes: Console, tests: int) -> Iterator[Callable[[str], None]]:
    """Show progress. Yield a function of the name of the test that begins."""
    with _show_progress(
        notes, SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _DESCRIPTION
    ) as progress:
        task = progress.add_task("", total=tests)
        yield lambda name: progress.update(task, advance=1, description=name)


def _show_progress(notes: Console, *columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=notes, transient=True, disable=notes.quiet or not notes.is_terminal)
