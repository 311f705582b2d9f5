"""Running a command's coroutine, its exit status, settings, addresses and options."""

import asyncio
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import typer
from tests.support.fakes import proxying
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.runner import Exit, address_of, fail, rollout_ids, run, settings_of, usage_error
from proxy.cli.settings import InvalidSettings
from storage.errors import StoreUnreachable


async def work(error: BaseException | None = None) -> int:
    if error is not None:
        raise error
    await asyncio.sleep(0)
    return 7


def test_the_result_of_the_coroutine_is_returned():
    assert run(work()) == 7


@pytest.mark.parametrize(
    "error", [StoreUnreachable("no \x1b store"), ValueError("no \x1b store"), OSError("no \x1b store")]
)
def test_a_failure_is_an_escaped_message_and_exit_status_1(error, capsys):
    with pytest.raises(typer.Exit) as ended:
        run(work(error))

    assert ended.value.exit_code == Exit.FAILED
    assert capsys.readouterr().err == "tokentape: no \\x1b store\n"


def test_a_failed_connection_is_a_sentence(capsys):
    with pytest.raises(typer.Exit):
        run(work(ConnectionRefusedError(111, "Connect call failed")))

    assert capsys.readouterr().err == "tokentape: Connection refused\n"


def test_invalid_settings_have_exit_status_78_and_other_values_a_chosen_one(capsys):
    """The commands that start servers choose 78 too."""
    codes = []
    for error, chosen in ((InvalidSettings("no"), Exit.FAILED), (ValueError("no"), Exit.REFUSED)):
        with pytest.raises(typer.Exit) as ended:
            run(work(error), on_value_error=chosen)
        codes.append(ended.value.exit_code)

    assert codes == [78, 78]
    assert capsys.readouterr().err == "tokentape: no\n" * 2


def test_a_broken_pipe_has_exit_status_0(capfd):
    """It occurs with `tokentape list | head -1`."""
    with pytest.raises(typer.Exit) as ended:
        run(work(BrokenPipeError()))

    assert ended.value.exit_code == Exit.DONE
    assert capfd.readouterr().err == ""


def test_ctrl_c_has_exit_status_130():
    with pytest.raises(typer.Exit) as ended:
        run(work(KeyboardInterrupt()))

    assert ended.value.exit_code == 130


def test_a_misused_command_has_exit_status_2(capsys):
    with pytest.raises(typer.Exit) as ended:
        fail("not both", code=Exit.MISUSED)

    assert ended.value.exit_code == 2
    assert "not both" in capsys.readouterr().err


async def failing(error: Exception) -> None:
    raise error


def test_invalid_settings_exit_with_78(capsys):
    """The message names the setting."""
    with pytest.raises(typer.Exit) as ended:
        settings_of(None, listen="nowhere")

    assert ended.value.exit_code == Exit.REFUSED
    assert "listen: invalid address 'nowhere'" in capsys.readouterr().err


def test_the_address_is_a_url_with_a_key_or_the_settings_of_a_store(tmp_path):
    by_url, by_store = address_of("http://x", None, "k"), address_of("http://x", f"embedded:{tmp_path}", "k")

    assert (by_url.url, by_url.settings, by_url.api_key) == ("http://x", None, "k")
    assert (by_store.url, by_store.settings.store.url, by_store.api_key) == (None, f"embedded:{tmp_path}", None)


def test_misuse_and_failures_have_their_exit_codes(capsys):
    codes = []
    for fails in (lambda: usage_error("not both"), lambda: run(failing(OSError("away")))):
        with pytest.raises(typer.Exit) as ended:
            fails()
        codes.append(ended.value.exit_code)

    assert codes == [Exit.MISUSED, Exit.FAILED]
    assert capsys.readouterr().err == "tokentape: not both\ntokentape: away\n"


KEYS = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"]}}


async def completions(url: str | None, prefix: str = "", key: str | None = None) -> list[str]:
    context = SimpleNamespace(params={"url": url, "api_key": key})
    return await asyncio.to_thread(rollout_ids, context, prefix)


async def test_rollout_ids_with_the_prefix_are_completed_newest_first(call_proxy, address):
    """IDs with characters that a shell interprets are not completed."""
    for name in ("a/1", "a-2", "b", "$(reboot)", "a b", "a;ls", "a\u202e"):
        await call_proxy("POST", "/rollouts", {"rollout_id": name})

    assert await completions(address.url, "a") == ["a-2", "a/1"]
    assert await completions(address.url) == ["b", "a-2", "a/1"]


async def test_completion_uses_the_api_key_of_the_command_line(http, store):
    """Without it nothing is completed."""
    async with proxying(None, store, **KEYS) as served:
        headers = {"Authorization": "Bearer c"}
        async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r"}, headers=headers) as response:
            assert response.status == 201

        assert await completions(served.url, key="c") == ["r"]
        assert await completions(served.url) == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "file:///etc", None, "http://[", "http://a:b@c:1", "https://127.0.0.1:9"]
)
async def test_an_unreachable_proxy_completes_nothing(url, monkeypatch):
    """A shell gets no traceback."""
    monkeypatch.setattr("proxy.cli.running.DEFAULT_URL", "http://127.0.0.1:9")  # on the default port one may run
    assert await completions(url) == []


def test_version_prints_the_version_of_the_package():
    done = CliRunner().invoke(app, ["--version"])

    assert (Exit.DONE, f"tokentape {version('tokentape')}\n") == (done.exit_code, done.stdout)


@pytest.mark.parametrize("words", ["serve --help", "rollout finish --help", "--help"])
def test_flags_have_no_value_in_the_help(words):
    """An option such as --listen has one."""
    shown = CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"}).stdout

    assert "--help" in shown
    assert "bool" not in shown
    assert (words == "--help") == ("<str>" not in shown)


def test_without_a_command_the_help_is_printed():
    """The exit status is the same as for a wrong command line."""
    done = CliRunner().invoke(app, [])

    assert done.exit_code == Exit.MISUSED
    assert "recording reverse proxy" in done.output
    assert "export" in done.output
