"""Where things are printed."""

import io

import orjson
from rich.text import Text

from proxy.cli.console import new_table, output, print_error, print_json, print_lines, print_note, print_table


def test_what_is_no_terminal_gets_no_colours_and_no_cuts(make_console):
    """A line of a thousand characters is one line."""
    out = make_console()
    print_lines(out, [Text("x" * 1000, "bold red")])

    assert "x" * 1000 + "\n" == out.file.getvalue()


def test_a_piped_row_is_one_line_that_no_other_row_widens(make_console):
    """Columns are aligned as far as most cells go; a longer cell moves what is behind it, and no line ends in blanks."""
    out, table = make_console(), new_table([("name", False, False), ("count", True, True), ("note", False, False)])
    for row in (("a", "1", ""), ("\u4e16\u754c", "20", "x" * 500), ("n" * 100, "3", "[b]"), ("", "", "")):
        table.add_row(*map(Text, row))
    print_table(out, table)

    assert [
        "name  count  note",
        "a         1",
        "\u4e16\u754c     20  " + "x" * 500,
        "n" * 100 + "      3  [b]",
        "",
    ] == out.file.getvalue().splitlines()


def test_no_piped_line_ends_in_blanks(make_console):
    """What would align a column that is empty here is left out."""
    out = make_console()
    print_lines(out, [Text("user        ") + Text("  ", "bold"), Text("  a  ")])

    assert "user\n  a\n" == out.file.getvalue()


def test_a_line_that_a_terminal_has_no_room_for_goes_on_indented(make_console):
    """At any width nothing is lost, and no line is wider than the terminal."""
    for width in (20, 40, 80):
        out = make_console(width, is_terminal=True)
        print_lines(out, [Text("user        " + "word " * 30)])
        lines = out.file.getvalue().splitlines()

        assert 30 == sum(line.count("word") for line in lines)
        assert all(len(line) <= width for line in lines)
        assert all(line.startswith(" " * 12) for line in lines[1:])


def test_no_color_is_heard_where_colours_would_be(monkeypatch):
    """https://no-color.org: also where they are forced, which FORCE_COLOR does in a pipe."""
    for environment, is_coloured in (({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)):
        with monkeypatch.context() as patched:
            patched.delenv("NO_COLOR", raising=False)
            for name, value in {"TERM": "xterm-256color", **environment}.items():
                patched.setenv(name, value)
            out = output(io.StringIO())
            out.print(Text("x", "red"))

        assert is_coloured == ("\x1b[31m" in out.file.getvalue())


def test_json_is_one_document_or_one_line(capsys):
    """On standard output, whatever is in it."""
    print_json({"a": "\x1b", "b": [1]})
    print_json({"a": 1}, lines=True)
    first, second = capsys.readouterr().out.rsplit("\n{", 1)

    assert {"a": "\x1b", "b": [1]} == orjson.loads(first)
    assert '"a":1}\n' == second
    assert "\x1b" not in first


def test_notes_go_to_standard_error_with_nothing_a_terminal_obeys(capsys):
    """Sentences hold what engines and proxies answered."""
    print_error("it answered \x1b[2J [red]no[/red]\nand more")
    print_note("seen \x1b[1m")
    told = capsys.readouterr()

    assert "" == told.out
    assert "tokentape: it answered \\x1b[2J [red]no[/red]\nand more\nseen \\x1b[1m\n" == told.err
