"""Consoles, tables, escaping of text, and progress bars."""

import io

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from proxy.cli.console import (
    audit_bar,
    export_bar,
    new_table,
    output,
    print_error,
    print_json,
    print_lines,
    print_note,
    print_table,
    visible,
    visible_json,
    visible_lines,
)


def test_output_to_a_pipe_has_no_colours_and_is_not_wrapped(make_console):
    out = make_console()
    print_lines(out, [Text("x" * 1000, "bold red")])

    assert out.file.getvalue() == "x" * 1000 + "\n"


def test_a_piped_row_is_one_line_of_a_width_that_ignores_the_longest_row(make_console):
    """Columns are aligned for most cells; a longer cell shifts the following ones."""
    out, table = make_console(), new_table([("name", False, False), ("count", True, True), ("note", False, False)])
    for row in (("a", "1", ""), ("\u4e16\u754c", "20", "x" * 500), ("n" * 100, "3", "[b]"), ("", "", "")):
        table.add_row(*map(Text, row))
    print_table(out, table)

    assert out.file.getvalue().splitlines() == [
        "name  count  note",
        "a         1",
        "\u4e16\u754c     20  " + "x" * 500,
        "n" * 100 + "      3  [b]",
        "",
    ]


def test_no_piped_line_ends_in_spaces(make_console):
    out = make_console()
    print_lines(out, [Text("user        ") + Text("  ", "bold"), Text("  a  ")])

    assert out.file.getvalue() == "user\n  a\n"


def test_a_long_line_is_wrapped_and_indented_in_a_terminal(make_console):
    """No line is wider than the terminal."""
    for width in (20, 40, 80):
        out = make_console(width, is_terminal=True)
        print_lines(out, [Text("user        " + "word " * 30)])
        lines = out.file.getvalue().splitlines()

        assert sum(line.count("word") for line in lines) == 30
        assert all(len(line) <= width for line in lines)
        assert all(line.startswith(" " * 12) for line in lines[1:])


def test_no_color_disables_colours_also_with_force_color(monkeypatch):
    """See https://no-color.org."""
    for environment, is_coloured in (({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)):
        with monkeypatch.context() as patched:
            patched.delenv("NO_COLOR", raising=False)
            for name, value in {"TERM": "xterm-256color", **environment}.items():
                patched.setenv(name, value)
            out = output(io.StringIO())
            out.print(Text("x", "red"))

        assert is_coloured == ("\x1b[31m" in out.file.getvalue())


def test_json_is_printed_as_one_document_or_as_lines(capsys):
    print_json({"a": "\x1b", "b": [1]})
    print_json({"a": 1}, lines=True)
    first, second = capsys.readouterr().out.rsplit("\n{", 1)

    assert orjson.loads(first) == {"a": "\x1b", "b": [1]}
    assert second == '"a":1}\n'
    assert "\x1b" not in first


def test_notes_are_escaped_and_printed_to_standard_error(capsys):
    """They may quote engines and proxies."""
    print_error("response \x1b[2J [red]no[/red]\nand more")
    print_note("seen \x1b[1m")
    printed = capsys.readouterr()

    assert printed.out == ""
    assert printed.err == "tokentape: response \\x1b[2J [red]no[/red]\nand more\nseen \\x1b[1m\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b2J", r"\x9b2J"),
        ("a\nb\r\tc\x07\x7f", r"a\nb\r\tc\x07\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\U000e0041", r"\U000e0041"),
        ("\ud800", r"\ud800"),
        ("plain, ümlaut, 漢字, 👩\u200d🚀", "plain, ümlaut, 漢字, 👩\u200d🚀"),
    ],
)
def test_control_and_format_characters_are_escaped(text, shown):
    """These are terminal escapes, line ends, direction marks and tags; letters of any script are unchanged."""
    assert shown == visible(text)


@settings(max_examples=50)
@given(st.text(st.characters()))
def test_escaped_text_has_no_control_characters_and_one_line(text):
    """It can be encoded as UTF-8."""
    shown = visible(text)
    shown.encode()

    assert not [character for character in shown if ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0]
    assert len(shown.splitlines() or [""]) == 1


@given(st.text(st.characters(codec="utf-8")))
@settings(max_examples=50)
def test_escaped_json_has_the_same_value_and_no_control_characters(text):
    shown = visible_json(orjson.dumps({"a": text}).decode())

    assert orjson.loads(shown) == {"a": text}
    assert shown == visible(shown)


def test_json_is_escaped_with_json_escapes():
    """Letters of any script are unchanged."""
    assert visible_json('"\x9b\u202e\U000e0041ü漢"') == r'"\u009b\u202e\udb40\udc41ü漢"'


def test_lines_of_a_text_are_kept_and_tabs_are_spaces():
    """A carriage return, which could overwrite its line, is escaped."""
    assert visible_lines("a\tb\nc\rd\n") == ["a   b", "c\\rd", ""]


@pytest.fixture
def notes():
    return Console(file=io.StringIO(), width=120, force_terminal=True)


def shown(console: Console) -> str:
    return Text.from_ansi(console.file.getvalue()).plain


def test_an_export_shows_bytes_and_rollouts_of_the_total(notes):
    with export_bar(notes, 2) as update:
        update(1_500_000, 0)
        update(500, 1)

    assert "1/2 rollouts 1.5 MB" in shown(notes)


def test_an_export_of_an_unknown_number_of_rollouts_shows_bytes_only(notes):
    with export_bar(notes, 0) as update:
        update(999, 0)
        update(1, 1)

    assert "exporting 1.0 kB" in shown(notes)
    assert "rollouts" not in shown(notes)


@pytest.mark.parametrize("count", [3, None])
def test_an_audit_shows_how_many_sequences_are_aligned(notes, count):
    """It shows the total if known."""
    with audit_bar(notes, count) as count_sequence:
        count_sequence(True)
        count_sequence(False)

    assert "audited 2 sequences, 1 aligned" in shown(notes)
    assert ("2/3" in shown(notes)) == (count is not None)


def test_without_a_terminal_no_progress_is_shown():
    for console in (Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True, quiet=True)):
        with export_bar(console, 2) as update, audit_bar(console, 2) as count_sequence:
            update(1, 1)
            count_sequence(True)

        assert console.file.getvalue() == ""
