"""What `tokentape` says of itself."""

from importlib.metadata import version

from typer.testing import CliRunner

from proxy.cli.exit_codes import Exit
from proxy.cli.main import app


def test_the_version_is_the_packages():
    """As one line, for reports of mistakes."""
    done = CliRunner().invoke(app, ["--version"])

    assert (Exit.DONE, f"tokentape {version('tokentape')}\n") == (done.exit_code, done.stdout)


def test_without_a_command_it_says_what_there_is():
    """What it is, and its commands; the exit code is that of a wrong command line."""
    done = CliRunner().invoke(app, [])

    assert Exit.MISUSED == done.exit_code
    assert "recording reverse proxy" in done.output
    assert "export" in done.output
