"""Options of the command line: shell completion, --version, and the help."""

import asyncio
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from tests.support.fakes import proxying
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.options import rollout_ids
from proxy.cli.runner import Exit

KEYS = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"]}}


async def completions(url: str | None, prefix: str = "", key: str | None = None) -> list[str]:
    context = SimpleNamespace(params={"url": url, "api_key": key})
    return await asyncio.to_thread(rollout_ids, context, prefix)


async def test_rollout_ids_with_the_prefix_are_completed_newest_first(call_proxy, address):
    """IDs with characters that a shell interprets are not completed."""
    for name in ("a/1", "a-2", "b", "$(reboot)", "a b", "a;ls", "a\u202e"):
        await call_proxy("POST", "/rollouts", {"rollout_id": name})

    assert ["a-2", "a/1"] == await completions(address.url, "a")
    assert ["b", "a-2", "a/1"] == await completions(address.url)


async def test_completion_uses_the_api_key_of_the_command_line(http, store):
    """Without it nothing is completed."""
    async with proxying(None, store, **KEYS) as served:
        headers = {"Authorization": "Bearer c"}
        async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r"}, headers=headers) as response:
            assert 201 == response.status

        assert ["r"] == await completions(served.url, key="c")
        assert [] == await completions(served.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "file:///etc", None, "http://[", "https://127.0.0.1:9"])
async def test_an_unreachable_proxy_completes_nothing(url):
    """A shell gets no traceback."""
    assert [] == await completions(url)


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

    assert Exit.MISUSED == done.exit_code
    assert "recording reverse proxy" in done.output
    assert "export" in done.output
