"""What commands print of rollouts, groups and steps of a running proxy."""

from dataclasses import replace
from functools import partial

import orjson
import pytest
from rich.text import Text
from tests.support.fakes import settings_for

from proxy.cli.commands import ago, listed, open_page, print_rollout, print_step
from proxy.cli.control import ControlAddress
from proxy.cli.render import StepView
from proxy.cli.runner import print_answer
from proxy.clock import SystemClock
from proxy.server.listener import running


async def print_list(address, out, noun, limit, *, as_json, **filters):
    await print_answer(address, partial(listed, noun=noun, limit=limit, **filters), as_json=as_json, out=out)


@pytest.mark.parametrize(
    ("names", "path"),
    [((None, None), ""), (("a/b", None), "#/rollout/a%2Fb"), ((None, "g"), "#/group/g")],
)
async def test_the_page_is_opened_in_the_browser_and_printed(address, capsys, monkeypatch, names, path):
    """Without a browser a note explains it."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or len(opened) < 2)
    await open_page(address, *names)
    assert capsys.readouterr().err == ""
    await open_page(replace(address, url=f"{address.url}/"), *names)
    printed = capsys.readouterr()

    assert [f"{address.url}/ui{path}"] * 2 == opened
    assert f"{address.url}/ui{path}\n" == printed.out
    assert "no browser found" in printed.err


async def test_no_page_is_opened_where_no_proxy_responds(monkeypatch):
    monkeypatch.setattr("webbrowser.open", pytest.fail)
    with pytest.raises(OSError, match="Connection refused"):
        await open_page(ControlAddress("http://127.0.0.1:9", None, None), None, None)


async def test_rollouts_are_listed_newest_first_up_to_the_limit(address, recorded, make_console, capsys):
    """Standard error reports that there are more, or none."""
    out = make_console()
    await print_list(address, out, "rollouts", 2, as_json=False)
    assert [line.split()[0] for line in out.file.getvalue().splitlines()] == ["rollout", "choices", "bad"]
    assert "more than 2 rollouts; use --limit" in capsys.readouterr().err

    out = make_console()
    await print_list(address, out, "rollouts", 50, as_json=False, status="completed", group_id=None)
    assert [line.split()[0] for line in out.file.getvalue().splitlines()] == ["rollout", "demo"]
    await print_list(address, make_console(), "rollouts", 50, as_json=False, status="failed")
    assert "no rollouts match the filters" in capsys.readouterr().err


async def test_groups_are_listed_with_their_columns(address, recorded, make_console):
    out = make_console()
    await print_list(address, out, "groups", 50, as_json=False)

    assert out.file.getvalue().splitlines()[1].split()[:3] == ["g", "open", "0/1"]


async def test_hidden_columns_are_named_on_standard_error(address, recorded, make_console, capsys):
    await print_list(address, make_console(40, is_terminal=True), "rollouts", 50, as_json=False)

    assert "columns not shown: " in capsys.readouterr().err


async def test_a_list_as_json_is_the_control_apis_response(address, recorded, make_console, capsys):
    await print_list(address, make_console(), "rollouts", 2, as_json=True)
    payload = orjson.loads(capsys.readouterr().out)

    assert [rollout["rollout_id"] for rollout in payload["rollouts"]] == ["choices", "bad"]
    assert payload["cursor"]


async def test_a_rollout_as_json_has_its_tree_and_all_steps(address, recorded, make_console, capsys):
    out = make_console()
    await print_rollout(address, out, "demo", StepView(logprobs=True, with_values=True), as_json=False)
    assert out.file.getvalue().count("exact\n") == 3
    assert out.file.getvalue().count("logprob") == 4
    await print_rollout(address, out, "demo", StepView(), as_json=True)
    payload = orjson.loads(capsys.readouterr().out)

    assert (payload["rollout"]["rollout_id"], len(payload["tree"]["nodes"]), len(payload["steps"])) == ("demo", 3, 3)


@pytest.mark.parametrize("width", [24, 60, 200])
async def test_a_rollout_fits_into_a_terminal_of_any_width(address, recorded, make_console, width):
    """No colour is left open at the end of a line."""
    out = make_console(width, is_terminal=True)
    await print_rollout(address, out, "demo", StepView(ids=True, logprobs=True), as_json=False)
    lines = out.file.getvalue().splitlines()

    assert all(Text.from_ansi(line).cell_len <= width for line in lines)
    assert all(line.endswith("\x1b[0m") or "\x1b" not in line.rpartition("\x1b[0m")[2] for line in lines)


async def test_a_step_can_be_named_by_its_id_or_its_index(address, recorded, make_console, capsys):
    out = make_console()
    await print_step(address, out, "demo", "1", StepView(), as_json=True)
    step = orjson.loads(capsys.readouterr().out)
    await print_step(address, out, "demo", step["step_id"], StepView(), as_json=False)

    assert step["index"] == 1
    assert f"step 1  {step['step_id']}" in out.file.getvalue()
    with pytest.raises(OSError, match="no step with index 9"):
        await print_step(address, out, "demo", "9", StepView(), as_json=False)
    with pytest.raises(OSError, match="no step 'S9'"):
        await print_step(address, out, "demo", "S9", StepView(), as_json=False)


async def test_no_piped_line_of_list_and_show_ends_in_spaces(address, call_proxy, recorded, make_console):
    """A name of 256 characters does not widen other rows."""
    await call_proxy("POST", "/rollouts", {"rollout_id": "r" * 256, "group_id": "g" * 256})
    out = make_console()
    for noun in ("rollouts", "groups"):
        await print_list(address, out, noun, 50, as_json=False)
    for view in (StepView(), StepView(ids=True, logprobs=True, whole=True, with_values=True)):
        await print_rollout(address, out, "demo", view, as_json=False)
        await print_step(address, out, "demo", "0", view, as_json=False)
    lines = out.file.getvalue().splitlines()

    assert "r" * 256 in lines[1]
    assert [line for line in lines if line != line.rstrip()] == []
    assert [line for line in lines if " " * 100 in line] == []


async def test_an_unknown_rollout_is_an_error_with_the_proxys_message(address, make_console):
    with pytest.raises(OSError, match="Rollout 'none' not found."):
        await print_rollout(address, make_console(), "none", StepView(), as_json=False)


async def test_a_store_without_a_running_proxy_can_be_read(tmp_path, engine, make_console):
    """The command starts a proxy with the configured keys."""
    keys = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"]}}
    settings = settings_for(engine.url, store={"url": f"embedded:{tmp_path / 'store'}"}, **keys)
    async with running(settings):
        pass
    out = make_console()
    await print_list(ControlAddress(None, settings, None), out, "rollouts", 5, as_json=False)

    assert out.file.getvalue() == ""


def test_a_duration_has_the_units_s_m_h_and_d():
    now = SystemClock().now()
    assert [round(now - ago(duration), -1) for duration in ("90s", "15m", "2h", "3d")] == [90, 900, 7200, 259_200]
    assert ago("99999999d") == 0
    for duration in ("", "h", "2", "2w", "-1h"):
        with pytest.raises(ValueError, match="invalid duration"):
            ago(duration)
