"""How far an export or an audit has come."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from proxy.cli.console import audit_bar, export_bar


@pytest.fixture
def notes():
    return Console(file=io.StringIO(), width=120, force_terminal=True)


def shown(console: Console) -> str:
    return Text.from_ansi(console.file.getvalue()).plain


def test_an_export_tells_bytes_and_rollouts_of_all(notes):
    """Where it is known how many there are."""
    with export_bar(notes, 2) as moved:
        moved(1_500_000, 0)
        moved(500, 1)

    assert "1/2 rollouts 1.5 MB" in shown(notes)


def test_an_export_of_nobody_knows_how_many_tells_bytes(notes):
    """No bar that would promise an end."""
    with export_bar(notes, 0) as moved:
        moved(999, 0)
        moved(1, 1)

    assert "exporting 1.0 kB" in shown(notes)
    assert "rollouts" not in shown(notes)


@pytest.mark.parametrize("count", [3, None])
def test_an_audit_tells_how_many_are_aligned(notes, count):
    """Of all, where that is known."""
    with audit_bar(notes, count) as seen:
        seen(True)
        seen(False)

    assert "audited 2 sequences, 1 aligned" in shown(notes)
    assert ("2/3" in shown(notes)) == (count is not None)


def test_where_there_is_no_terminal_nothing_is_shown():
    """Logs and pipes get no bars."""
    for console in (Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True, quiet=True)):
        with export_bar(console, 2) as moved, audit_bar(console, 2) as seen:
            moved(1, 1)
            seen(True)

        assert "" == console.file.getvalue()
