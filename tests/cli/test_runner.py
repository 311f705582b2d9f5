"""A command's work, run to its end."""

import asyncio

import pytest
import typer

from proxy.cli.exit_codes import Exit
from proxy.cli.runner import fail, run
from storage.errors import StoreUnreachable


async def ends(error: BaseException | None = None) -> int:
    if error is not None:
        raise error
    await asyncio.sleep(0)
    return 7


def test_what_comes_of_the_work_is_given_back():
    """Run on a loop of its own."""
    assert 7 == run(ends())


@pytest.mark.parametrize(
    "error", [StoreUnreachable("no \x1b store"), ValueError("no \x1b store"), OSError("no \x1b store")]
)
def test_a_failure_is_a_sentence_and_a_code(error, capsys):
    """Never a traceback, nor what a terminal would obey."""
    with pytest.raises(typer.Exit) as ended:
        run(ends(error))

    assert Exit.FAILED == ended.value.exit_code
    assert "tokentape: no \\x1b store\n" == capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_failure(capfd):
    """As `tokentape list | head -1` has it."""
    with pytest.raises(typer.Exit) as ended:
        run(ends(BrokenPipeError()))

    assert Exit.DONE == ended.value.exit_code
    assert "" == capfd.readouterr().err


def test_ctrl_c_has_a_code_of_its_own():
    """The shell's 130."""
    with pytest.raises(typer.Exit) as ended:
        run(ends(KeyboardInterrupt()))

    assert 130 == ended.value.exit_code


def test_a_command_that_is_wrong_has_another_code(capsys):
    """2, as every misspelt option."""
    with pytest.raises(typer.Exit) as ended:
        fail("not both", code=Exit.MISUSED)

    assert 2 == ended.value.exit_code
    assert "not both" in capsys.readouterr().err
