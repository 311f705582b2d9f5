"""`tokentape check`: printing findings."""

import orjson

from proxy.cli.check import Finding, print_findings, single

FOUND = (
    Finding("listen", "ok", "free"),
    Finding("store", "note", "clock \x1b[2J", "set [it]"),
    Finding("engine", "fault", "unreachable\nsecond line", "start it"),
)


async def found(*findings):
    for finding in findings:
        yield finding


async def test_a_finding_has_its_grade_and_its_fix_below(make_console):
    """Quotations are escaped; a fault fails the check."""
    out = make_console()
    is_well = await print_findings(found(*FOUND), out, as_json=False)

    assert not is_well
    assert [
        "ok   listen: free",
        "note store: clock \\x1b[2J",
        "     -> set [it]",
        "FAIL engine: unreachable",
        "     second line",
        "     -> start it",
    ] == out.file.getvalue().splitlines()


async def test_notes_do_not_fail_the_check(make_console):
    assert await print_findings(found(*FOUND[:2]), make_console(), as_json=False)


async def test_with_json_all_findings_are_one_document(make_console, capsys):
    out = make_console()
    await print_findings(single(FOUND[2]), out, as_json=True)

    assert {
        "well": False,
        "findings": [{"subject": "engine", "grade": "fault", "seen": "unreachable\nsecond line", "fix": "start it"}],
    } == orjson.loads(capsys.readouterr().out)
    assert "" == out.file.getvalue()
