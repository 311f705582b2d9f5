"""The results: whether training is safe, the line for a bug report, and the lines that are compared between runs."""

import orjson
import pytest

from proxy.cli.certify.certificate import FAULTS, MEANINGS, Cell, Certificate, results_of, sentences


def certificate(*verdicts: str) -> Certificate:
    made = Certificate("vllm", "0.32.0", "m", "1.2.3", "2026-11-27")
    for number, verdict in enumerate(verdicts):
        made.add("chat", f"shape {number // 2}", Cell(verdict, "why"), stream=number % 2 == 1)
    return made


def test_results_of_one_shape_are_one_row():
    rows = certificate("exact", "flagged", "ok").rows

    assert ["shape 0", "shape 1"] == [row.name for row in rows]
    assert [["exact", "flagged"], ["ok"]] == [[cell.verdict for cell in row.cells] for row in rows]


@pytest.mark.parametrize("verdict", MEANINGS)
def test_training_is_safe_unless_something_is_wrong_that_is_no_known_limitation(verdict):
    """And only if something is exact."""
    assert (verdict not in FAULTS) == certificate("exact", verdict).is_safe
    assert (verdict == "exact") == certificate(verdict).is_safe


def test_an_incomplete_run_is_not_safe():
    made = certificate("exact")
    made.ended = "the engine is gone"

    assert not made.is_safe
    assert made.badge.endswith("1 exact | NOT SAFE: incomplete | 2026-11-27")


def test_the_line_for_a_bug_report_has_versions_counts_and_the_date():
    assert (
        certificate("exact", "exact", "flagged", "forks").badge
        == "tokentape 1.2.3 | vllm 0.32.0 | 2 exact, 1 flagged, 1 forks | safe | 2026-11-27"
    )
    assert "NOT SAFE: 1 differs, 1 wrong |" in certificate("exact", "wrong", "differs").badge
    assert "NOT SAFE: no token ids |" in certificate("flagged").badge


def test_compared_lines_have_results_and_problems_and_no_dates():
    made = certificate("exact", "flagged")
    made.add("stops", "a", Cell("flagged", problems=("echo", "no_usage")), stream=True)

    lines = results_of(orjson.loads(orjson.dumps(made.to_json())))
    assert [
        "chat, shape 0, whole: exact",
        "chat, shape 0, streamed: flagged",
        "stops, a, streamed: flagged echo no_usage",
    ] == lines


def test_scores_are_weighed_by_tokens():
    """Without tokens there is no mean, and the reason."""
    scores = certificate().scores
    scores.add(1, 0.4, 0.4)
    scores.add(3, 0.0, 0.0)

    assert (2, 4, 0.1, 0.4) == tuple(scores.to_json()[name] for name in ("sequences", "tokens", "mean", "max"))
    assert certificate().scores.to_json()["mean"] is None


def test_a_fault_comes_with_what_to_do_and_equal_sentences_are_one():
    (row,) = certificate("wrong", "wrong").rows

    assert all(cell.fix for cell in row.cells)
    assert [("why", row.cells[0].fix)] == sentences(row.cells)
