"""Audit results, their summary and their table."""

import io

import orjson
from rich.console import Console
from scoring import honest_row, score

from proxy.cli.audit import table
from proxy.rollouts.audit.report import NOT_SCORED, NOTHING, Result, is_well, of_finding, summary
from proxy.rollouts.audit.sample import of_row
from proxy.rollouts.audit.verdict import judge


def result_of(row: dict) -> Result:
    recorded = of_row(row)
    scored = score(recorded.token_ids)
    return of_finding(recorded, scored, judge(recorded, scored, 0.01))


def replaced() -> Result:
    row = honest_row("[r2]")
    row["logprobs"][30] = -15.0
    return result_of(row)


def test_the_first_token_beyond_the_tolerance_has_its_index_step_neighbours_and_values():
    first = replaced().first
    ids = honest_row()["token_ids"]

    assert (30, "S1", ids[30]) == (first["position"], first["step_id"], first["id"])
    assert (ids[25:30], ids[31:36]) == (first["before"], first["after"])
    assert (-15.0, score(ids)[30]) == (first["recorded"], first["scored"])


def test_the_summary_counts_verdicts_and_weights_means_by_tokens():
    first, second, unscored = result_of(honest_row()), replaced(), Result("r3", 0, NOT_SCORED, note="why")
    payload = orjson.loads(orjson.dumps(summary([first, second, unscored])))

    assert {"aligned": 1, "wrong tokens": 1, "not scored": 1} == payload["verdicts"]
    assert 60 == payload["tokens"]
    assert (first.mean + second.mean) / 2 == payload["mean"]
    assert second.max == payload["max"]
    assert ["r1", "[r2]", "r3"] == [sequence["rollout_id"] for sequence in payload["sequences"]]


def test_an_audit_passes_if_all_compared_sequences_are_aligned():
    """Without a compared sequence it fails."""
    nothing = Result("r4", 0, NOTHING, skipped=5)

    assert is_well([result_of(honest_row()), nothing])
    assert not is_well([nothing])
    assert 5 == summary([nothing])["skipped"]
    assert is_well([result_of(honest_row())])
    assert not is_well([result_of(honest_row()), Result("r3", 0, NOT_SCORED)])
    assert not is_well([])
    assert None is summary([])["mean"]


def test_the_table_has_a_row_per_result_with_unchanged_names():
    console = Console(file=io.StringIO(), width=300)
    console.print(table([replaced(), Result("r3", 0, NOT_SCORED, note="it is no row")]))
    shown = console.file.getvalue()

    assert "[r2]" in shown
    assert "wrong tokens" in shown
    assert "recorded -15" in shown
    assert "it is no row" in shown


def test_control_characters_in_names_and_notes_are_escaped():
    """Rollouts are named by agents, and notes quote responses of engines."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table([Result("r\x1b[2J[red]", 0, NOT_SCORED, note="response \x9b2J")]))

    assert r"r\x1b[2J[red]" in console.file.getvalue()
    assert r"response \x9b2J" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()
