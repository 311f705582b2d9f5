"""What an audit tells."""

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


def test_the_first_token_beyond_the_tolerance_has_its_context():
    """Where it is, whose step, the ids around it, and both values."""
    first = replaced().first
    ids = honest_row()["token_ids"]

    assert (30, "S1", ids[30]) == (first["place"], first["step_id"], first["id"])
    assert (ids[25:30], ids[31:36]) == (first["before"], first["after"])
    assert (-15.0, score(ids)[30]) == (first["recorded"], first["scored"])


def test_the_summary_counts_verdicts_and_weighs_means_by_tokens():
    """And can be written as JSON."""
    one, two, none = result_of(honest_row()), replaced(), Result("r3", 0, NOT_SCORED, note="why")
    told = orjson.loads(orjson.dumps(summary([one, two, none])))

    assert {"aligned": 1, "wrong tokens": 1, "not scored": 1} == told["verdicts"]
    assert 60 == told["tokens"]
    assert (one.mean + two.mean) / 2 == told["mean"]
    assert two.max == told["max"]
    assert ["r1", "[r2]", "r3"] == [each["rollout_id"] for each in told["sequences"]]


def test_nothing_is_well_unless_all_that_was_compared_is_aligned():
    """No sequence at all is not well either, nor some that have nothing to compare."""
    nothing = Result("r4", 0, NOTHING, skipped=5)

    assert is_well([result_of(honest_row()), nothing])
    assert not is_well([nothing])
    assert 5 == summary([nothing])["skipped"]
    assert is_well([result_of(honest_row())])
    assert not is_well([result_of(honest_row()), Result("r3", 0, NOT_SCORED)])
    assert not is_well([])
    assert None is summary([])["mean"]


def test_the_table_has_a_line_for_each():
    """Names are shown as they are, whatever they hold."""
    console = Console(file=io.StringIO(), width=300)
    console.print(table([replaced(), Result("r3", 0, NOT_SCORED, note="it is no row")]))
    shown = console.file.getvalue()

    assert "[r2]" in shown
    assert "wrong tokens" in shown
    assert "recorded -15" in shown
    assert "it is no row" in shown


def test_a_hostile_name_or_note_is_harmless():
    """Rollouts are named by agents, and notes hold what engines answered."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table([Result("r\x1b[2J[red]", 0, NOT_SCORED, note="it said \x9b2J")]))

    assert r"r\x1b[2J[red]" in console.file.getvalue()
    assert r"it said \x9b2J" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()
