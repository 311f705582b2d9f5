"""`tokentape check`: findings, as they are found."""

import orjson

from proxy.cli.check import Finding, print_findings, single

FOUND = (
    Finding("listen", "ok", "free"),
    Finding("store", "note", "clock \x1b[2J", "set [it]"),
    Finding("engine", "fault", "away\nand lost", "start it"),
)


async def found(*findings):
    for finding in findings:
        yield finding


async def test_each_finding_has_a_mark_and_what_mends_it_below(make_console):
    """What engines answered is harmless, and no markup; a fault makes all of it one."""
    out = make_console()
    is_well = await print_findings(found(*FOUND), out, as_json=False)

    assert not is_well
    assert [
        "ok   listen: free",
        "note store: clock \\x1b[2J",
        "     -> set [it]",
        "FAIL engine: away",
        "     and lost",
        "     -> start it",
    ] == out.file.getvalue().splitlines()


async def test_notes_are_no_faults(make_console):
    """Worth knowing, and well all the same."""
    assert await print_findings(found(*FOUND[:2]), make_console(), as_json=False)


async def test_as_json_all_findings_are_one_document(make_console, capsys):
    """With whether all is well."""
    out = make_console()
    await print_findings(single(FOUND[2]), out, as_json=True)

    assert {
        "well": False,
        "findings": [{"subject": "engine", "grade": "fault", "seen": "away\nand lost", "fix": "start it"}],
    } == orjson.loads(capsys.readouterr().out)
    assert "" == out.file.getvalue()
