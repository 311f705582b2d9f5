"""`tokentape check`: printing findings."""

import orjson

from proxy.cli.check import Finding, print_findings, refused
from proxy.cli.runner import Exit
from proxy.cli.settings import InvalidSettings

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
    code = await print_findings(found(*FOUND), out, as_json=False)

    assert Exit.FOUND == code
    assert [
        "ok   listen: free",
        "note store: clock \\x1b[2J",
        "     -> set [it]",
        "FAIL engine: unreachable",
        "     second line",
        "     -> start it",
    ] == out.file.getvalue().splitlines()


async def test_notes_do_not_fail_the_check(make_console):
    assert Exit.DONE == await print_findings(found(*FOUND[:2]), make_console(), as_json=False)


async def test_faults_with_the_same_exit_code_have_it_and_others_have_3(make_console):
    """A note does not count, with any exit code."""
    port, ids = (Finding("s", "fault", "x", "y", code) for code in (Exit.ADDRESS_IN_USE, Exit.UNTRAINABLE))
    note = Finding("s", "note", "x", "y", Exit.UNTRAINABLE)
    cases = {(port, port): 5, (ids,): 4, (port, ids): 3, (ids, FOUND[2]): 3, (note,): 0, (port, note): 5}

    for findings, code in cases.items():
        assert code == await print_findings(found(*findings), make_console(), as_json=False)


async def test_each_invalid_setting_is_a_finding_with_its_name():
    """Without a name it is about the configuration as a whole."""
    faults = [("listen", "invalid address"), ("", "unreadable")]
    findings = [finding async for finding in refused(InvalidSettings("invalid configuration:", faults))]

    assert [("listen", "invalid address"), ("configuration", "unreadable")] == [(f.subject, f.seen) for f in findings]


async def test_with_json_all_findings_are_one_document(make_console, capsys):
    out = make_console()
    await print_findings(found(FOUND[2]), out, as_json=True)

    assert {
        "well": False,
        "exit_code": 3,
        "findings": [
            {
                "subject": "engine",
                "grade": "fault",
                "seen": "unreachable\nsecond line",
                "fix": "start it",
                "exit_code": 3,
            }
        ],
    } == orjson.loads(capsys.readouterr().out)
    assert "" == out.file.getvalue()
