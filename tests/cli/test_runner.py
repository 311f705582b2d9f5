"""Running a command's coroutine, and its exit status."""

import asyncio

import pytest
import typer

from proxy.cli.exit_codes import Exit
from proxy.cli.runner import fail, run
from proxy.cli.settings import InvalidSettings
from storage.errors import StoreUnreachable


async def work(error: BaseException | None = None) -> int:
    if error is not None:
        raise error
    await asyncio.sleep(0)
    return 7


def test_the_result_of_the_coroutine_is_returned():
    assert 7 == run(work())


@pytest.mark.parametrize(
    "error", [StoreUnreachable("no \x1b store"), ValueError("no \x1b store"), OSError("no \x1b store")]
)
def test_a_failure_is_an_escaped_message_and_exit_status_1(error, capsys):
    with pytest.raises(typer.Exit) as ended:
        run(work(error))

    assert Exit.FAILED == ended.value.exit_code
    assert "tokentape: no \\x1b store\n" == capsys.readouterr().err


def test_a_failed_connection_is_a_sentence(capsys):
    with pytest.raises(typer.Exit):
        run(work(ConnectionRefusedError(111, "Connect call failed")))

    assert "tokentape: Connection refused\n" == capsys.readouterr().err


def test_invalid_settings_have_exit_status_78_and_other_values_a_chosen_one(capsys):
    """The commands that start servers choose 78 too."""
    codes = []
    for error, chosen in ((InvalidSettings("no"), Exit.FAILED), (ValueError("no"), Exit.REFUSED)):
        with pytest.raises(typer.Exit) as ended:
            run(work(error), on_value_error=chosen)
        codes.append(ended.value.exit_code)

    assert [78, 78] == codes
    assert "tokentape: no\n" * 2 == capsys.readouterr().err


def test_a_broken_pipe_has_exit_status_0(capfd):
    """It occurs with `tokentape list | head -1`."""
    with pytest.raises(typer.Exit) as ended:
        run(work(BrokenPipeError()))

    assert Exit.DONE == ended.value.exit_code
    assert "" == capfd.readouterr().err


def test_ctrl_c_has_exit_status_130():
    with pytest.raises(typer.Exit) as ended:
        run(work(KeyboardInterrupt()))

    assert 130 == ended.value.exit_code


def test_a_misused_command_has_exit_status_2(capsys):
    with pytest.raises(typer.Exit) as ended:
        fail("not both", code=Exit.MISUSED)

    assert 2 == ended.value.exit_code
    assert "not both" in capsys.readouterr().err
