"""Tables of rollouts and groups."""

import pytest

from proxy.cli.console import output
from proxy.cli.render import age, drift, number, table
from proxy.clock import SystemClock

AGE_MS = 2 * 3600_000 + 60_000


def rollout(name: str, **fields) -> dict:
    counts = {"steps": 3, "exact": 2, "flagged": 1, "error": 0, "sampled_tokens": 12_345}
    values = {"rollout_id": name, "group_id": "g1", "status": "completed", "reward": 0.25, "drift": {"edited": 1}}
    return {**values, "counts": counts, "created_ms": SystemClock().now_ms() - AGE_MS, **fields}


def group(name: str, **fields) -> dict:
    values = {"group_id": name, "status": "open", "finished": 1, "members": 4, "size": 4, "policy_version": "7"}
    return {**values, "created_ms": SystemClock().now_ms() - AGE_MS, **fields}


def lines(made, out) -> list[str]:
    out.print(made)
    return out.file.getvalue().splitlines()


def test_a_wide_table_has_all_columns_of_a_rollout(make_console):
    made, hidden = table("rollouts", [rollout("demo")], 4096)
    head, line = lines(made, make_console())

    assert hidden == []
    assert line.split() == ["demo", "g1", "completed", "0.25", "3", "2", "1", "0", "12345", "1", "edited", "2", "h"]
    assert head.split() == [
        "rollout",
        "group",
        "status",
        "reward",
        "steps",
        "exact",
        "flagged",
        "error",
        "tokens",
        "drift",
        "age",
    ]


@pytest.mark.parametrize("noun", ["rollouts", "members"])
def test_a_table_with_a_playback_has_a_column_for_its_source(make_console, noun):
    """And for how many steps it has from there; a table without one has no such column."""
    row = {**rollout("r2"), "steps": 3, "flagged": 0}
    made, _ = table(noun, [row, {**row, "playback": {"of": "\x1br1", "answered": 2}}], 4096)
    head, first, second = lines(made, make_console())

    assert "playback of" in head
    assert r"\x1br1 (2 inherited)" in second
    assert "inherited" not in first
    assert "playback of" not in lines(table(noun, [row], 4096)[0], make_console())[0]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_a_table_fits_into_any_width(make_console, width):
    """The least important columns are hidden first, and named; a long ID is wrapped."""
    name = "rollout-" + "0123456789" * 4
    made, hidden = table("rollouts", [rollout(name)], width)
    shown = lines(made, make_console(width, is_terminal=True))

    assert all(len(plain(line)) <= width for line in shown)
    assert name == "".join(plain(line).split(" ")[0] for line in shown[1:])
    assert {"rollout", "status"}.isdisjoint(hidden)
    assert hidden or width >= 100
    assert hidden == [] or "age" in hidden


def test_names_in_tables_are_escaped(make_console):
    made, _ = table("rollouts", [rollout("[red]a\u202e", group_id="\x1b[2J")], 4096)
    _, line = lines(made, make_console())

    assert line.startswith(r"[red]a\u202e  \x1b[2J")


def test_the_table_of_groups_has_the_consumer_or_the_reason_of_dropping(make_console):
    made, _ = table("groups", [group("g1", consumer="t1", status="claimed"), group("g2", why="stale")], 4096)
    _, first, second = lines(made, make_console())

    assert first.split() == ["g1", "claimed", "1/4", "4", "7", "t1", "2", "h"]
    assert "stale" in second


def test_numbers_ages_and_drift_are_abbreviated():
    assert [number(None), number(1.0), number(1 / 3)] == ["", "1", "0.333333"]
    now_ms = SystemClock().now_ms()
    assert [age(now_ms - s * 1000) for s in (-1, 150, 10_900, 172_900)] == ["now", "2 min", "3 h", "2 d"]
    assert age(now_ms - 30_000) in {"30 s", "31 s"}
    assert [drift(None), drift({"template": 1, "edited": 2})] == ["", "2 edited, 1 template"]


def plain(line: str) -> str:
    """Return a line without colours."""
    from rich.text import Text

    return Text.from_ansi(line).plain


def test_a_table_in_a_file_has_all_columns(tmp_path):
    with (tmp_path / "out").open("w") as file:
        _, hidden = table("rollouts", [rollout("x" * 256)], output(file).width)

    assert hidden == []


def engine(**fields) -> dict:
    values = {"name": "e", "kind": "vllm", "version": "0.32", "in_flight": 3, "queued": 0, "faults": 1, "models": ["m"]}
    return {**values, "url": "http://e", "healthy": True, "ejected_until": None, "last_fault": None, **fields}


def test_an_engine_is_healthy_ejected_or_unreachable(make_console):
    engines = [engine(), engine(healthy=False, ejected_until=1.5), engine(healthy=False, last_fault="no\x1b")]
    made, hidden = table("engines", engines, 4096)
    _, *rows = lines(made, make_console())

    assert hidden == []
    assert rows[0].split() == ["e", "healthy", "vllm", "0.32", "3", "0", "1", "m", "http://e"]
    assert [row.split()[1] for row in rows[1:]] == ["ejected", "UNREACHABLE"]
    assert rows[2].rstrip().endswith("no\\x1b")


def test_a_policy_shows_what_its_new_calls_do(make_console):
    values = {"name": "p", "version": None, "train": True, "models": ["a", "b"]}
    made, _ = table("policies", [{**values, "mode": mode} for mode in (None, "wait", "reject")], 4096)
    _, *rows = lines(made, make_console())

    assert [["p", state, "yes", "a,", "b"] for state in ("sent", "wait", "rejected")] == [row.split() for row in rows]


def test_a_member_of_a_group_shows_why_it_ended_and_what_replaces_it(make_console):
    member = {"rollout_id": "r", "status": "failed", "reward": 0.5, "steps": 2, "flagged": 1, "drift": None}
    made, _ = table("members", [member, {**member, "reason": "deadline", "replaced_by": "r~1"}], 4096)
    _, *rows = lines(made, make_console())

    assert rows[0].split() == ["r", "failed", "0.5", "2", "1"]
    assert rows[1].split()[-2:] == ["deadline", "r~1"]


@pytest.mark.parametrize("width", [30, 60, 120])
def test_tables_of_engines_and_policies_fit_into_any_width(make_console, width):
    made = [
        table("engines", [engine(last_fault="x" * 200, url="http://" + "e" * 60)], width),
        table("policies", [{"name": "p", "version": "7", "mode": None, "train": True, "models": ["m" * 80]}], width),
    ]
    for one, hidden in made:
        shown = lines(one, make_console(width, is_terminal=True))
        assert hidden
        assert all(len(plain(line)) <= width for line in shown)
