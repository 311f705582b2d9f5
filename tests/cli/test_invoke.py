"""What commands share."""

import pytest
import typer

from proxy.cli.exit_codes import Exit
from proxy.cli.invoke import address_of, run, settings_of, usage_error


async def failing(error: Exception) -> None:
    raise error


def test_invalid_settings_exit_with_78(capsys):
    """The message names the setting."""
    with pytest.raises(typer.Exit) as ended:
        settings_of(None, listen="nowhere")

    assert Exit.REFUSED == ended.value.exit_code
    assert "listen: invalid address 'nowhere'" in capsys.readouterr().err


def test_the_address_is_a_url_with_a_key_or_the_settings_of_a_store(tmp_path):
    by_url, by_store = address_of("http://x", None, "k"), address_of("http://x", f"embedded:{tmp_path}", "k")

    assert ("http://x", None, "k") == (by_url.url, by_url.settings, by_url.api_key)
    assert (None, f"embedded:{tmp_path}", None) == (by_store.url, by_store.settings.store.url, by_store.api_key)


def test_misuse_and_failures_have_their_exit_codes(capsys):
    codes = []
    for fails in (lambda: usage_error("not both"), lambda: run(failing(OSError("away")))):
        with pytest.raises(typer.Exit) as ended:
            fails()
        codes.append(ended.value.exit_code)

    assert [Exit.MISUSED, Exit.FAILED] == codes
    assert "tokentape: not both\ntokentape: away\n" == capsys.readouterr().err
